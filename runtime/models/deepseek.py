"""The DeepSeek-V2 / V3 family: embedding, decoder layers, head and MTP layer over one paged latent cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp.head import MtpHead
from parallel.linear import Linear, Storage
from parallel.norm import RmsNorm
from runtime.attention.meta import AttentionMeta, KvSpec
from runtime.attention.mla_pass import MlaPass, prepare_pass
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderLayer, HalfState
from runtime.models.loader import EMBED_NAME, Embedding, Loader
from runtime.models.rope import rotation_table
from runtime.weights import WeightSource


class DeepseekModel:
    """A target and, when the checkpoint has one, its MTP head; both use the same pages and passes."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embed: Embedding,
        layers: list[DecoderLayer],
        norm: RmsNorm,
        head: Linear,
        rotations: Tensor,
        mtp: MtpHead[AttentionMeta] | None,
    ) -> None:
        self.config = config
        self.mtp = mtp
        self.layers = layers
        self._embed, self._norm, self._head = embed, norm, head
        self._rotations = rotations  # [max_position_embeddings, qk_rope_head_dim / 2] complex64

    @classmethod
    def load(
        cls,
        source: WeightSource,
        config: ModelConfig,
        *,
        device: str | torch.device = "cpu",
        storage: Storage = "auto",
        with_mtp: bool = True,
    ) -> DeepseekModel:
        """Read every tensor of `source`; `with_mtp=False` leaves the MTP layer out.

        Raises ValueError with one line naming the tensor that is missing, unexpected, mis-shaped or not finite, or
        that does not fit `storage`.
        """
        device = torch.device(device)
        with torch.inference_mode(), Loader(source, config, device, storage) as loader:
            rotations = rotation_table(config.rope, config.qk_rope_head_dim, config.max_position_embeddings, device)
            embed = loader.embedding(EMBED_NAME)
            layers = [loader.layer(i) for i in range(config.num_hidden_layers)]
            norm = loader.norm("model.norm.weight", config.hidden_size)
            head = loader.head()
            mtp = _load_mtp(loader, embed, head, rotations) if with_mtp and config.num_mtp_layers else None
            loader.ignore_known_extras(keep_mtp=with_mtp)
            source.check_consumed()
        return cls(config, embed=embed, layers=layers, norm=norm, head=head, rotations=rotations, mtp=mtp)

    @property
    def kv_spec(self) -> KvSpec:
        num_layers = self.config.num_hidden_layers + (self.mtp is not None)
        return KvSpec(num_layers=num_layers, width=self.config.latent_width, dtype_bytes=4)

    def allocate_kv(self, num_pages: int, page_size: int) -> list[Tensor]:
        """Zeroed pages: per layer [num_pages, page_size, latent_width] float32; the MTP layer's come last."""
        shape = (num_pages, page_size, self.config.latent_width)
        return [torch.zeros(shape, device=self._rotations.device) for _ in range(self.kv_spec.num_layers)]

    def forward(self, token_ids: Tensor, meta: AttentionMeta, kv: list[Tensor]) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size] after the final norm; writes `kv` at meta.write_index.

        No expert sees the tokens of meta.dummy, and nobody reads their results.
        """
        state = HalfState(self._embed(token_ids), self.prepare(meta), kv, meta.dummy)
        for layer in self.layers:
            layer.run(state)
        return self._norm(state.hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] from `forward` -> [n, vocab_size] float32."""
        return self._head(hidden)

    def prepare(self, meta: AttentionMeta) -> MlaPass:
        return prepare_pass(meta, self._rotations, self.config.num_attention_heads)


class MtpBlock:
    """The head's decoder layer, with its pass worked out from the step's meta."""

    def __init__(self, layer: DecoderLayer, rotations: Tensor, num_heads: int) -> None:
        self._layer, self._rotations, self._num_heads = layer, rotations, num_heads

    def __call__(self, hidden: Tensor, meta: AttentionMeta, kv: list[Tensor]) -> Tensor:
        state = HalfState(hidden, prepare_pass(meta, self._rotations, self._num_heads), kv, meta.dummy)
        self._layer.run(state)
        return state.hidden


def _load_mtp(loader: Loader, embed: Embedding, head: Linear, rotations: Tensor) -> MtpHead[AttentionMeta]:
    config = loader.config
    loader.require_mtp()
    idx = config.num_hidden_layers
    prefix, hidden = f"model.layers.{idx}", config.hidden_size
    return MtpHead(
        embed=loader.own_embedding(f"{prefix}.embed_tokens.weight") or embed,
        embed_norm=loader.norm(f"{prefix}.enorm.weight", hidden),
        hidden_norm=loader.norm(f"{prefix}.hnorm.weight", hidden),
        input_proj=loader.linear([(f"{prefix}.eh_proj.weight", hidden)], 2 * hidden),
        block=MtpBlock(loader.layer(idx), rotations, config.num_attention_heads),
        final_norm=loader.norm(f"{prefix}.shared_head.norm.weight", hidden),
        output=loader.own_head(f"{prefix}.shared_head.head.weight") or head,
    )
