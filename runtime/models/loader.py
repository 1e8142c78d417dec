"""Builds the parts of a DeepSeek-format model from its checkpoint's tensors."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch

from moe.dispatcher import Dispatcher
from moe.experts import GatedMlp
from moe.placement import Placement
from parallel.linear import Linear, Storage
from parallel.norm import RmsNorm
from runtime.attention.mla import MlaAttention, MlaWeights
from runtime.attention.mla_projection import FoldedProjection, HeadProjection, MlaDims, PlainProjection, folding_pays
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderLayer
from runtime.models.embedding import Embedding, ShardedEmbedding, WholeEmbedding
from runtime.models.expert_loader import ExpertLoader
from runtime.models.part_reader import PartReader
from runtime.models.rope import softmax_scale
from runtime.models.shards import Part, Shards, block
from runtime.weights import WeightSource

# The norms inside attention have this constant in the published models, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6
MAX_LOAD_THREADS = 4
EMBED_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"


class Loader:
    """Turns names into parts of the model, cut to this rank's share. Products of one input are fused into one weight.

    A context manager: it owns the threads that pack experts.
    """

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        shards: Shards,
        dispatcher: Dispatcher,
        device: torch.device,
        storage: Storage,
        placement: Placement | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self.source, self.config = source, config
        self._shards, self._tp = shards, shards.groups.tp
        self._reader = PartReader(source, device, storage)
        self._pool = ThreadPoolExecutor(min(MAX_LOAD_THREADS, len(os.sched_getaffinity(0))))
        self._experts = ExpertLoader(
            self._reader, config, shards, dispatcher, self._pool, placement, ranks_per_node
        )
        self.num_heads = len(block(config.num_attention_heads, self._tp))
        self._dims = MlaDims(
            num_heads=self.num_heads,
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

    @property
    def experts(self) -> ExpertLoader:
        return self._experts

    def norm(self, name: str, dim: int, eps: float | None = None) -> RmsNorm:
        return self._reader.norm(name, dim, self.config.rms_norm_eps if eps is None else eps)

    def whole_linear(self, name: str, rows: int, cols: int) -> Linear:
        return self._reader.linear(self._shards.whole(name, rows, cols))

    # ---- embedding and head: this rank's words

    def embedding(self, name: str) -> Embedding:
        part = self._words(name)
        table = self._reader.table(part)
        return WholeEmbedding(table) if self._tp.size == 1 else ShardedEmbedding(table, part.rows.start)

    def head(self) -> Linear:
        tied = self.config.tie_word_embeddings
        if tied and self.source.has(HEAD_NAME) and not self._is_copy(HEAD_NAME, EMBED_NAME):
            raise ValueError(f"tie_word_embeddings = true but {HEAD_NAME} differs from {EMBED_NAME}")
        return self._reader.linear(self._words(EMBED_NAME if tied else HEAD_NAME))

    def own_embedding(self, name: str) -> Embedding | None:
        """The MTP layer's embedding, or None when it is absent or a copy of the target's."""
        if not self.source.has(name) or self._is_copy(name, EMBED_NAME):
            return None
        return self.embedding(name)

    def own_head(self, name: str) -> Linear | None:
        target = EMBED_NAME if self.config.tie_word_embeddings else HEAD_NAME
        if not self.source.has(name) or self._is_copy(name, target):
            return None
        return self._reader.linear(self._words(name))

    def _words(self, name: str) -> Part:
        return self._shards.rows(name, self.config.vocab_size, self.config.hidden_size)

    def _is_copy(self, name: str, other: str) -> bool:
        """As far as this rank's words go; what the others find changes nothing here."""
        return self.source.is_copy(name, other, rows=self._words(other).rows)

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
            tp=self._tp,
            attention_norm=self.norm(f"{prefix}.input_layernorm.weight", hidden),
            attention=self.attention(f"{prefix}.self_attn"),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=self.dense_mlp(f"{prefix}.mlp") if is_dense else self._experts.moe(idx, f"{prefix}.mlp"),
        )

    def dense_mlp(self, prefix: str) -> GatedMlp:
        """This rank's inner features; its output is a part of the sum over tp."""
        shards, hidden, width = self._shards, self.config.hidden_size, self.config.intermediate_size
        gate, up = (shards.rows(f"{prefix}.{name}_proj.weight", width, hidden) for name in ("gate", "up"))
        down = shards.cols(f"{prefix}.down_proj.weight", hidden, width)
        return GatedMlp(self._reader.linear(gate, up), self._reader.linear(down))

    def attention(self, prefix: str) -> MlaAttention:
        """This rank's heads over the latents, which every rank of the group works out and keeps."""
        config, dims, shards = self.config, self._dims, self._shards
        latent = shards.whole(f"{prefix}.kv_a_proj_with_mqa.weight", dims.latent_width, config.hidden_size)
        query_norm = None
        if config.q_lora_rank is None:
            query_out = config.num_attention_heads * dims.query_dim
            first = shards.rows(f"{prefix}.q_proj.weight", query_out, config.hidden_size)
        else:
            first = shards.whole(f"{prefix}.q_a_proj.weight", config.q_lora_rank, config.hidden_size)
            query_norm = self.norm(f"{prefix}.q_a_layernorm.weight", config.q_lora_rank, LATENT_NORM_EPS)
        weights = MlaWeights(
            input_proj=self._reader.linear(first, latent),
            query_norm=query_norm,
            latent_norm=self.norm(f"{prefix}.kv_a_layernorm.weight", dims.rank, LATENT_NORM_EPS),
            heads=self._head_projection(prefix),
        )
        return MlaAttention(dims, weights)

    def _head_projection(self, prefix: str) -> HeadProjection:
        config, dims, shards = self.config, self._dims, self._shards
        heads = config.num_attention_heads
        kv_b_part = shards.rows(f"{prefix}.kv_b_proj.weight", heads * (dims.nope_dim + dims.value_dim), dims.rank)
        kv_b = self._reader.weight(kv_b_part).view(dims.num_heads, -1, dims.rank)
        output = shards.cols(f"{prefix}.o_proj.weight", config.hidden_size, heads * dims.value_dim)
        if config.q_lora_rank is None:
            return PlainProjection(dims, None, kv_b, self._reader.linear(output))
        query = shards.rows(f"{prefix}.q_b_proj.weight", heads * dims.query_dim, config.q_lora_rank)
        if folding_pays(dims, config.q_lora_rank, config.hidden_size):
            return FoldedProjection(dims, self._reader.weight(query), kv_b, self._reader.weight(output))
        return PlainProjection(dims, self._reader.linear(query), kv_b, self._reader.linear(output))

    def _is_mtp_name(self, name: str) -> bool:
        return name.startswith(f"model.layers.{self.config.num_hidden_layers}.")
