"""Builds the parts of a DeepSeek-format model from its checkpoint's tensors."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from moe.dispatcher import LocalDispatcher
from moe.experts import DENSE_MAX_ELEMENTS, DenseExperts, GatedMlp, GroupedExperts, SmallExperts
from moe.layer import MoeLayer
from moe.router import Router
from parallel.linear import Linear, Storage, build_linear
from parallel.norm import RmsNorm
from runtime.attention.mla import MlaAttention, MlaWeights
from runtime.attention.mla_projection import FoldedProjection, HeadProjection, MlaDims, PlainProjection, folding_pays
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderLayer
from runtime.models.rope import softmax_scale
from runtime.weights import WeightSource

# The norms inside attention have this constant in the published models, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6
MAX_LOAD_THREADS = 4
EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"


class Embedding:
    """Rows of a table in the checkpoint's own type, widened after the look-up."""

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [vocab_size, hidden_size]

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int64 -> a new [num_tokens, hidden_size] float32."""
        return self.table.index_select(0, token_ids).to(torch.float32)


class Scratch(threading.local):
    """One growing buffer a thread: the page faults of fresh memory would cost more than the copies into it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def get(self, num_elements: int) -> Tensor:
        """[num_elements] float32, overwritten by the thread's next call."""
        if self._buffer.numel() < num_elements:
            self._buffer = torch.empty(num_elements)
        return self._buffer[:num_elements]


class Loader:
    """Turns names into parts. Products that share their input are fused into one weight.

    A context manager: it owns the threads that pack experts.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, device: torch.device, storage: Storage) -> None:
        self.source, self.config, self.device, self.storage = source, config, device, storage
        self._scratch = Scratch()
        self._pool = ThreadPoolExecutor(min(MAX_LOAD_THREADS, len(os.sched_getaffinity(0))))
        self._dims = MlaDims(
            num_heads=config.num_attention_heads,
            rank=config.kv_lora_rank,
            nope_dim=config.qk_nope_head_dim,
            rope_dim=config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
            scale=softmax_scale(config.rope, config.qk_nope_head_dim + config.qk_rope_head_dim),
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    # ---- primitive parts

    def weight(self, parts: list[tuple[str, int]], in_features: int) -> Tensor:
        """[sum of rows, in_features] float32: the named tensors of the given rows, one below the other."""
        fused = torch.empty(sum(rows for _, rows in parts), in_features)
        self._fill(fused, parts)
        return fused.to(self.device)

    def linear(self, parts: list[tuple[str, int]], in_features: int) -> Linear:
        """One product of the named tensors, whose rows are fused."""
        num_rows = sum(rows for _, rows in parts)
        scratch = self._scratch.get(num_rows * in_features).view(num_rows, in_features)
        self._fill(scratch, parts)
        return build_linear(scratch.to(self.device), self.storage, parts[0][0])

    def norm(self, name: str, dim: int, eps: float | None = None) -> RmsNorm:
        return RmsNorm(self.source.take(name, (dim,)).to(self.device), self.config.rms_norm_eps if eps is None else eps)

    def _fill(self, dest: Tensor, parts: list[tuple[str, int]]) -> None:
        begin = 0
        for name, rows in parts:
            self.source.take_into(dest[begin : begin + rows], name)
            begin += rows

    # ---- embedding and head

    def embedding(self, name: str) -> Embedding:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return Embedding(self.source.take(name, shape, dtype=None).to(self.device))

    def head(self) -> Linear:
        tied = self.config.tie_word_embeddings
        if tied and self.source.has(HEAD_NAME) and not self.source.is_copy(HEAD_NAME, EMBED_NAME):
            raise ValueError(f"tie_word_embeddings = true but {HEAD_NAME} differs from {EMBED_NAME}")
        return self.linear([(EMBED_NAME if tied else HEAD_NAME, self.config.vocab_size)], self.config.hidden_size)

    def own_embedding(self, name: str) -> Embedding | None:
        """The MTP layer's embedding, or None when it is absent or a copy of the target's."""
        if not self.source.has(name) or self.source.is_copy(name, EMBED_NAME):
            return None
        return self.embedding(name)

    def own_head(self, name: str) -> Linear | None:
        target = EMBED_NAME if self.config.tie_word_embeddings else HEAD_NAME
        if not self.source.has(name) or self.source.is_copy(name, target):
            return None
        return self.linear([(name, self.config.vocab_size)], self.config.hidden_size)

    # ---- layers

    def require_mtp(self) -> None:
        """A checkpoint saved without its MTP layer may still announce one in config.json."""
        if not any(self._is_mtp_name(name) for name in self.source.names()):
            raise ValueError(
                f"{self.source.folder}: num_nextn_predict_layers = {self.config.num_mtp_layers}, but there are no "
                f"tensors model.layers.{self.config.num_hidden_layers}.*; set draft_tokens to 0"
            )

    def ignore_known_extras(self, *, keep_mtp: bool) -> None:
        """Rotary tables of old checkpoints, and the MTP layer when it was left out on purpose."""
        unused = [n for n in self.source.names() if n.endswith(".rotary_emb.inv_freq")]
        if not keep_mtp and self.config.num_mtp_layers > 0:
            unused += [n for n in self.source.names() if self._is_mtp_name(n)]
        self.source.ignore(unused)

    def layer(self, idx: int) -> DecoderLayer:
        prefix, hidden = f"model.layers.{idx}", self.config.hidden_size
        is_dense = idx < self.config.num_dense_layers
        return DecoderLayer(
            kv_idx=idx,
            attention_norm=self.norm(f"{prefix}.input_layernorm.weight", hidden),
            attention=self.attention(f"{prefix}.self_attn"),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=self.mlp(f"{prefix}.mlp", self.config.intermediate_size) if is_dense else self.moe(f"{prefix}.mlp"),
        )

    def mlp(self, prefix: str, width: int) -> GatedMlp:
        hidden = self.config.hidden_size
        gate_up = self.linear([(f"{prefix}.gate_proj.weight", width), (f"{prefix}.up_proj.weight", width)], hidden)
        return GatedMlp(gate_up, self.linear([(f"{prefix}.down_proj.weight", hidden)], width))

    def attention(self, prefix: str) -> MlaAttention:
        config, dims = self.config, self._dims
        latent = (f"{prefix}.kv_a_proj_with_mqa.weight", dims.latent_width)
        query_out, query_norm = dims.num_heads * dims.query_dim, None
        if config.q_lora_rank is None:
            first = (f"{prefix}.q_proj.weight", query_out)
        else:
            first = (f"{prefix}.q_a_proj.weight", config.q_lora_rank)
            query_norm = self.norm(f"{prefix}.q_a_layernorm.weight", config.q_lora_rank, LATENT_NORM_EPS)
        weights = MlaWeights(
            input_proj=self.linear([first, latent], config.hidden_size),
            query_norm=query_norm,
            latent_norm=self.norm(f"{prefix}.kv_a_layernorm.weight", dims.rank, LATENT_NORM_EPS),
            heads=self._head_projection(prefix),
        )
        return MlaAttention(dims, weights)

    def _head_projection(self, prefix: str) -> HeadProjection:
        config, dims = self.config, self._dims
        kv_b_rows = dims.num_heads * (dims.nope_dim + dims.value_dim)
        kv_b = self.weight([(f"{prefix}.kv_b_proj.weight", kv_b_rows)], dims.rank).view(dims.num_heads, -1, dims.rank)
        output = [(f"{prefix}.o_proj.weight", config.hidden_size)]
        output_in = dims.num_heads * dims.value_dim
        if config.q_lora_rank is None:
            return PlainProjection(dims, None, kv_b, self.linear(output, output_in))
        query = [(f"{prefix}.q_b_proj.weight", dims.num_heads * dims.query_dim)]
        if folding_pays(dims, config.q_lora_rank, config.hidden_size):
            query_weight = self.weight(query, config.q_lora_rank)
            return FoldedProjection(dims, query_weight, kv_b, self.weight(output, output_in))
        return PlainProjection(dims, self.linear(query, config.q_lora_rank), kv_b, self.linear(output, output_in))

    def moe(self, prefix: str) -> MoeLayer:
        config = self.config
        assert config.router is not None
        gate = self.source.take(f"{prefix}.gate.weight", (config.num_experts, config.hidden_size)).to(self.device)
        bias = None
        if config.router.method == "noaux_tc":
            bias = self.source.take(f"{prefix}.gate.e_score_correction_bias", (config.num_experts,)).to(self.device)
        router = Router(config.router, gate, bias)
        num_blocks = config.num_experts + config.num_shared_experts
        if num_blocks * 3 * config.moe_intermediate_size * config.hidden_size <= DENSE_MAX_ELEMENTS:
            return MoeLayer(router, LocalDispatcher(), self._small_experts(prefix, num_blocks), None)
        return MoeLayer(router, LocalDispatcher(), self._grouped_experts(prefix), self._shared_expert(prefix))

    def _shared_expert(self, prefix: str) -> GatedMlp | None:
        count = self.config.num_shared_experts
        return self.mlp(f"{prefix}.shared_experts", self.config.moe_intermediate_size * count) if count else None

    def _grouped_experts(self, prefix: str) -> GroupedExperts:
        def expert(idx: int) -> GatedMlp:
            with torch.inference_mode():  # a thread's own setting
                return self.mlp(f"{prefix}.experts.{idx}", self.config.moe_intermediate_size)

        # Packing is single-threaded inside and dominates loading; experts are independent.
        return GroupedExperts(list(self._pool.map(expert, range(self.config.num_experts))))

    def _small_experts(self, prefix: str, num_blocks: int) -> SmallExperts:
        config = self.config
        width, hidden = config.moe_intermediate_size, config.hidden_size
        many, shared = self._grouped_experts(prefix), self._shared_expert(prefix)
        gate_up = torch.empty(2, num_blocks * width, hidden)
        down = torch.empty(hidden, num_blocks * width)
        places = [(f"{prefix}.experts.{e}", e * width, (e + 1) * width) for e in range(config.num_experts)]
        if shared is not None:
            places.append((f"{prefix}.shared_experts", config.num_experts * width, num_blocks * width))
        for name, begin, end in places:
            self.source.take_into(gate_up[0, begin:end], f"{name}.gate_proj.weight")
            self.source.take_into(gate_up[1, begin:end], f"{name}.up_proj.weight")
            self.source.take_into(down[:, begin:end], f"{name}.down_proj.weight")
        few = DenseExperts(
            build_linear(gate_up.flatten(0, 1).to(self.device), self.storage, f"{prefix}.experts.*.gate_proj.weight"),
            build_linear(down.to(self.device), self.storage, f"{prefix}.experts.*.down_proj.weight"),
            config.num_experts,
            width,
            self.device,
        )
        return SmallExperts(few, many, shared)

    def _is_mtp_name(self, name: str) -> bool:
        return name.startswith(f"model.layers.{self.config.num_hidden_layers}.")
