"""How many bytes one rank needs, worked out from configuration and `config.json`: nothing is loaded or allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.config import EngineConfig
    from runtime.models.config import ModelConfig

FLOAT32, FLOAT16, STORED = 4, 2, 2  # bytes of a value; embeddings keep the checkpoint's own 16-bit type
# Context of the driver, workspaces of the libraries, fragmentation of the allocator; the CPU has nothing of the kind.
ACCELERATOR_OVERHEAD = 2 << 30


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes of one rank. `kv` is what its pages take, `least_kv` what one request of full length needs."""

    experts: int
    attention: int  # with norms
    other_weights: int  # embedding, head, dense layers, shared experts, routers, MTP projection
    kv: int
    least_kv: int
    tables: int
    step: int  # activations and exchanges of the largest step
    overhead: int

    @property
    def weights(self) -> int:
        return self.experts + self.attention + self.other_weights

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.tables + self.step + self.overhead

    def parts(self) -> dict[str, int]:
        """Name -> bytes, for tables."""
        return {
            "experts": self.experts, "attention": self.attention, "other weights": self.other_weights, "KV": self.kv,
            "tables": self.tables, "step": self.step, "overhead": self.overhead,
        }


def memory_need(config: EngineConfig, model: ModelConfig, *, value_bytes: int | None = None) -> MemoryNeed:
    """What a rank of `config` needs for `model`.

    `value_bytes`: of one weight; None is the storage that the engine really uses (float16 on the CPU unless the
    configuration says float32, float32 on accelerators).
    """
    size = value_bytes if value_bytes is not None else storage_bytes(config)
    with_mtp = config.k > 0 and model.num_mtp_layers > 0
    num_layers = model.num_hidden_layers + with_mtp
    num_dense = min(model.num_dense_layers, num_layers)
    num_moe = num_layers - num_dense
    per_rank = -(-(model.num_experts + config.redundant_experts) // config.layout.ep)
    expert = 3 * model.moe_intermediate_size * model.hidden_size
    shared = model.num_shared_experts * expert + model.num_experts * model.hidden_size
    dense = 3 * -(-model.intermediate_size // config.tp) * model.hidden_size
    words = -(-model.vocab_size // config.tp) * model.hidden_size
    projection = 2 * model.hidden_size**2 if with_mtp else 0
    head = 0 if model.tie_word_embeddings else words
    return MemoryNeed(
        experts=num_moe * per_rank * expert * size,
        attention=num_layers * _attention_values(config, model) * size,
        other_weights=(num_moe * shared + num_dense * dense + projection + head) * size + words * STORED,
        kv=_num_pages(config, model, num_layers) * config.page_size * _position_bytes(model, num_layers),
        least_kv=(_max_len(config, model) + config.page_size) * _position_bytes(model, num_layers),
        tables=_table_bytes(config, model),
        step=_step_bytes(config, model),
        overhead=0 if config.device.startswith("cpu") else ACCELERATOR_OVERHEAD,
    )


def storage_bytes(config: EngineConfig) -> int:
    """Bytes of one value of a large weight as `parallel.linear.build_linear` stores it."""
    return FLOAT16 if config.device.startswith("cpu") and config.storage != "float32" else FLOAT32


def _attention_values(config: EngineConfig, model: ModelConfig) -> int:
    """Weights of one layer's attention: latents whole, heads over tp."""
    heads = -(-model.num_attention_heads // config.tp)
    query = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    rank = model.kv_lora_rank
    hidden = model.hidden_size
    if model.q_lora_rank is None:
        from_hidden = query * hidden
    else:
        from_hidden = model.q_lora_rank * hidden + query * model.q_lora_rank
    heads_of_latents = heads * (model.qk_nope_head_dim + model.v_head_dim) * rank
    return from_hidden + model.latent_width * hidden + heads_of_latents + hidden * heads * model.v_head_dim


def _position_bytes(model: ModelConfig, num_layers: int) -> int:
    return num_layers * model.latent_width * FLOAT32


def _max_len(config: EngineConfig, model: ModelConfig) -> int:
    return config.max_model_len if config.max_model_len is not None else model.max_position_embeddings


def _num_pages(config: EngineConfig, model: ModelConfig, num_layers: int) -> int:
    """As `runtime.sizing.choose_sizes`, without its refusals."""
    if config.num_pages is not None:
        return config.num_pages
    wanted = config.max_num_seqs * -(-_max_len(config, model) // config.page_size) + 1
    return min(wanted, config.kv_cache_bytes // (config.page_size * _position_bytes(model, num_layers)))


def _table_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Slot-indexed tables: tokens, page numbers, counts for penalties, what the drafter carries."""
    length = _max_len(config, model)
    per_slot = 4 * (length + 1) + 8 * -(-length // config.page_size) + 4 * model.vocab_size + 4 * model.hidden_size
    return (config.max_num_seqs + 1) * per_slot


def _step_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens sent to and got from all ranks, activations of a layer, logits of all verify rows; float32."""
    top_k = model.router.top_k if model.router is not None else 0
    tokens = config.capacity * config.tp
    dispatched = 2 * config.layout.ep * config.capacity * (model.hidden_size + 2 * top_k)
    widest = max(model.intermediate_size // config.tp, model.moe_intermediate_size)
    layer = tokens * (4 * model.hidden_size + 2 * widest)
    logits = 3 * config.max_num_seqs * (1 + config.k) * -(-model.vocab_size // config.tp)
    return FLOAT32 * (dispatched + layer + logits)
