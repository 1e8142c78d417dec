"""The DeepSeek-V2 / V3 family: embedding, decoder layers, head and MTP layer over one paged latent cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.dispatcher import DispatchKind, make_dispatcher
from moe.placed import PlacedLayer
from moe.placement import Placement
from mtp.head import MtpHead
from parallel.halves import gather_halves, scatter_sums, split_tokens
from parallel.layout import RankGroups, solo_groups
from parallel.linear import Linear, Storage
from parallel.norm import RmsNorm
from runtime.attention.meta import AttentionMeta, KvSpec
from runtime.models.config import ModelConfig
from runtime.models.decoder import DecoderLayer
from runtime.models.embedding import Embedding
from runtime.models.loader import EMBED_NAME, Loader
from runtime.models.passes import Passes
from runtime.models.rope import rotation_table
from runtime.models.shards import Shards
from runtime.overlap import run_layers
from runtime.weights import WeightSource


class DeepseekModel:
    """One rank's share of a target and, when the checkpoint has one, of its MTP head; both use the same pages."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        groups: RankGroups,
        embed: Embedding,
        layers: list[DecoderLayer],
        norm: RmsNorm,
        head: Linear,
        passes: Passes,
        mtp: MtpHead[AttentionMeta] | None,
    ) -> None:
        self.config = config
        self.mtp = mtp
        self.layers = layers
        self.passes = passes
        self._groups = groups
        self._embed, self._norm, self._head = embed, norm, head
        self.placed: dict[int, PlacedLayer] = {}  # by layer, where a placement says who holds what
        self.fingerprints: dict[tuple[int, int], int] = {}  # of this rank's experts, by layer and expert

    @classmethod
    def load(
        cls,
        source: WeightSource,
        config: ModelConfig,
        *,
        groups: RankGroups | None = None,
        device: str | torch.device = "cpu",
        storage: Storage = "auto",
        with_mtp: bool = True,
        dispatch: DispatchKind = "auto",
        placement: Placement | None = None,
        ranks_per_node: int | None = None,
    ) -> DeepseekModel:
        """Read this rank's share of every tensor of `source`; `with_mtp=False` leaves the MTP layer out.

        `groups=None`: the only rank. The layout must divide the model (`check_layout`). No collective is called.
        `placement`: where experts are, if not in equal blocks in order of rank.
        Raises ValueError with one line naming the tensor that is missing, unexpected, mis-shaped or not finite, or
        that does not fit `storage`.
        """
        device = torch.device(device)
        groups = groups or solo_groups()
        num_experts = config.num_experts if placement is None else placement.num_ranks * placement.num_slots
        dispatcher = make_dispatcher(dispatch, groups.ep, num_experts, device)
        loading = Loader(
            source, config, Shards(groups), dispatcher, device, storage, placement, ranks_per_node or groups.ep.size
        )
        with torch.inference_mode(), loading as loader:
            rotations = rotation_table(config.rope, config.qk_rope_head_dim, config.max_position_embeddings, device)
            passes = Passes(rotations, loader.num_heads, groups.tp)
            embed = loader.embedding(EMBED_NAME)
            layers = [loader.layer(i) for i in range(config.num_hidden_layers)]
            norm = loader.norm("model.norm.weight", config.hidden_size)
            head = loader.head()
            mtp = None
            if with_mtp and config.num_mtp_layers:
                mtp = _load_mtp(loader, groups, embed, head, passes)
            loader.ignore_known_extras(keep_mtp=with_mtp)
            source.check_consumed()
        model = cls(
            config, groups=groups, embed=embed, layers=layers, norm=norm, head=head, passes=passes, mtp=mtp
        )
        model.placed, model.fingerprints = loading.experts.placed, loading.experts.fingerprints
        return model

    @property
    def kv_spec(self) -> KvSpec:
        return kv_spec(self.config, with_mtp=self.mtp is not None)

    def allocate_kv(self, num_pages: int, page_size: int) -> list[Tensor]:
        """Zeroed pages: per layer [num_pages, page_size, latent_width] float32; the MTP layer's come last."""
        shape = (num_pages, page_size, self.config.latent_width)
        return [torch.zeros(shape, device=self.passes.device) for _ in range(self.kv_spec.num_layers)]

    def forward(self, token_ids: Tensor, metas: Sequence[AttentionMeta], kv: list[Tensor]) -> Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden_size] after the final norm; writes `kv` where the metas say.

        One meta, or one for each half: then the tokens of half B follow those of A. The result is whole on every rank
        of tp. No expert sees the tokens that a meta calls dummy, and nobody reads their results.
        """
        sizes = [meta.num_tokens for meta in metas]
        tp = self._groups.tp
        embedded = scatter_sums(tp, [self._embed(ids) for ids in split_tokens(token_ids, sizes)])
        halves = self.passes.begin(embedded, metas, kv)
        run_layers(self.layers, halves, self._groups.ledger, self._groups.trace)
        return gather_halves(tp, [self._norm(half.hidden) for half in halves], sizes)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] from `forward` -> [n, vocab_size / tp] float32: this rank's words, which follow one another
        in order of rank."""
        return self._head(hidden)


def kv_spec(config: ModelConfig, *, with_mtp: bool) -> KvSpec:
    """Of one rank: every rank of an attention group holds the latents of all its tokens."""
    return KvSpec(num_layers=config.num_hidden_layers + with_mtp, width=config.latent_width, dtype_bytes=4)


class MtpBlock:
    """The head's decoder layer, over passes worked out from the step's metas."""

    def __init__(self, layer: DecoderLayer, passes: Passes, groups: RankGroups) -> None:
        self._layers, self._passes, self._groups = [layer], passes, groups

    def __call__(self, hidden: list[Tensor], metas: Sequence[AttentionMeta], kv: list[Tensor]) -> list[Tensor]:
        halves = self._passes.begin(hidden, metas, kv)
        run_layers(self._layers, halves, self._groups.ledger, self._groups.trace)
        return [half.hidden for half in halves]


def _load_mtp(
    loader: Loader, groups: RankGroups, embed: Embedding, head: Linear, passes: Passes
) -> MtpHead[AttentionMeta]:
    config = loader.config
    loader.require_mtp()
    idx = config.num_hidden_layers
    prefix, hidden = f"model.layers.{idx}", config.hidden_size
    return MtpHead(
        tp=groups.tp,
        embed=loader.own_embedding(f"{prefix}.embed_tokens.weight") or embed,
        embed_norm=loader.norm(f"{prefix}.enorm.weight", hidden),
        hidden_norm=loader.norm(f"{prefix}.hnorm.weight", hidden),
        input_proj=loader.whole_linear(f"{prefix}.eh_proj.weight", hidden, 2 * hidden),
        block=MtpBlock(loader.layer(idx), passes, groups),
        final_norm=loader.norm(f"{prefix}.shared_head.norm.weight", hidden),
        output=loader.own_head(f"{prefix}.shared_head.head.weight") or head,
    )
