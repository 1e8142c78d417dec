"""A toy target and MTP head that depend on every cached position, and their plain oracles without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtp.drafter import MtpDrafter
from runtime.attention.meta import AttentionMeta, KvSpec
from runtime.loading import LoadedModel, ModelFacts
from runtime.serve.detokenizer import DetokenizerFactory

_DECAY = 0.7


class ToyModel:
    """h_i = tanh(A e(x_i) + B sum_s decay^(i-s) kv_s), kv_s = e(x_s).

    It computes in float64, so that ids never hang on rounding. `nan_token` has an embedding of NaN; like the real
    models, this one lets only finite values into its cache.
    """

    def __init__(
        self, *, vocab_size: int = 50, hidden_size: int = 16, seed: int = 0, sharpness: float = 6.0,
        nan_token: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.embedding = random(vocab_size, hidden_size)
        if nan_token is not None:
            self.embedding[nan_token] = torch.nan
        self.own, self.past = random(hidden_size, hidden_size) / 4, random(hidden_size, hidden_size) / 4
        self.out = random(hidden_size, vocab_size) * sharpness / hidden_size
        self.bias = torch.zeros(vocab_size, dtype=torch.float64)
        self.noise = random(hidden_size, vocab_size) / hidden_size

    def allocate_kv(self, num_pages: int, page_size: int) -> list[Tensor]:
        return [torch.full((num_pages, page_size, self.hidden_size), 1e6, dtype=torch.float64) for _ in range(2)]

    def forward(self, token_ids: Tensor, metas: Sequence[AttentionMeta], kv: list[Tensor]) -> Tensor:
        entries = self.embedding[token_ids]
        return torch.tanh(entries @ self.own + attend(entries, metas, kv[0]) @ self.past)

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.out + self.bias).float()

    def plain_logits(self, token_ids: Sequence[int]) -> Tensor:
        """[n, V] logits of a whole sequence."""
        return self.logits(self.plain_hidden(token_ids))

    def plain_hidden(self, token_ids: Sequence[int]) -> Tensor:
        entries = self.embedding[torch.tensor(token_ids)]
        return torch.tanh(entries @ self.own + plain_attend(entries) @ self.past)


class ToyHead:
    """A head over (x_{i+1}, H_i) with its own cache; `error` blurs it so that acceptance is neither 0 nor 1.

    It guesses H_{i+1} as the target's own formula would, with the sum over the cache standing in for the past.
    """

    def __init__(self, model: ToyModel, *, error: float = 0.5) -> None:
        self._model = model
        self._out = model.out + error * model.noise

    def forward(
        self, token_ids: Tensor, hidden: Tensor, metas: Sequence[AttentionMeta], kv: list[Tensor]
    ) -> Tensor:
        model = self._model
        entries = model.embedding[token_ids] + 0.05 * hidden
        return torch.tanh(entries @ model.own + attend(entries, metas, kv[1]) @ model.past)

    def plain_states(self, next_tokens: Sequence[int], hidden: Tensor) -> Tensor:
        entries = self._model.embedding[torch.tensor(next_tokens)] + 0.05 * hidden
        return torch.tanh(entries @ self._model.own + plain_attend(entries) @ self._model.past)

    def logits(self, state: Tensor) -> Tensor:
        return (state @ self._out).float()


def attend(entries: Tensor, metas: Sequence[AttentionMeta], cache: Tensor) -> Tensor:
    """Of one pass or two halves, one after the other: [T, width] -> [T, width]."""
    parts = torch.split(entries, [meta.num_tokens for meta in metas])
    return torch.cat([attend_half(part, meta, cache) for part, meta in zip(parts, metas, strict=True)])


def attend_half(entries: Tensor, meta: AttentionMeta, cache: Tensor) -> Tensor:
    """Write `entries` [T, width] to the paged cache, then the decayed sum over each token's visible positions."""
    page_size = cache.shape[1]
    cache.view(-1, cache.shape[2])[meta.write_index] = entries.nan_to_num(0.0)
    parts = []
    if meta.decode is not None:
        group = meta.decode
        context = cache[group.page_table].flatten(1, 2)  # [D, S, width]
        own = meta.positions[: group.num_rows * group.q_len].view(group.num_rows, group.q_len, 1)
        distance = own - torch.arange(context.shape[1])
        weight = torch.where(group.mask == 0, _DECAY ** distance.double(), 0.0)
        parts.append((weight @ context).flatten(0, 1))
    for row in meta.prefill:
        stop = row.start + row.end - row.begin
        context = cache[row.pages].flatten(0, 1)[:stop]
        assert len(row.pages) == -(-stop // page_size)
        parts.append(_weights(stop)[row.start :] @ context)
    return torch.cat(parts) if parts else entries


def plain_attend(entries: Tensor) -> Tensor:
    return _weights(len(entries)) @ entries


def _weights(length: int) -> Tensor:
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return torch.where(distance >= 0, _DECAY ** distance.double(), 0.0)


def load_toy(
    *, vocab_size: int = 50, draft: bool = True, error: float = 0.5, seed: int = 0, max_len: int = 256,
    eos: tuple[int, ...] = (), sharpness: float = 6.0, nan_token: int | None = None,
    detokenizers: DetokenizerFactory | None = None, make_drafter: type[ToyDrafter] | None = None,
) -> LoadedModel:
    model = ToyModel(vocab_size=vocab_size, seed=seed, sharpness=sharpness, nan_token=nan_token)
    drafter = None
    if draft:
        head = ToyHead(model, error=error)
        drafter = (make_drafter or ToyDrafter)(head, hidden_size=model.hidden_size)
    facts = ModelFacts(
        vocab_size=vocab_size, max_position_embeddings=max_len, eos_token_ids=eos, detokenizers=detokenizers,
        kv_spec=KvSpec(num_layers=2, width=model.hidden_size, dtype_bytes=8),
        lookahead=drafter.lookahead if drafter is not None else 0,
    )
    return LoadedModel(facts=facts, model=model, drafter=drafter, device=torch.device("cpu"))


class ToyDrafter(MtpDrafter):
    """Carried states travel through float32 tables; the toy head computes in float64."""

    def __init__(self, head: ToyHead, *, hidden_size: int) -> None:
        super().__init__(_Float64(head), hidden_size=hidden_size)


class _Float64:
    def __init__(self, head: ToyHead) -> None:
        self._head = head

    def forward(
        self, token_ids: Tensor, hidden: Tensor, metas: Sequence[AttentionMeta], kv: list[Tensor]
    ) -> Tensor:
        return self._head.forward(token_ids, hidden.double(), metas, kv).float()

    def logits(self, state: Tensor) -> Tensor:
        return self._head.logits(state.double())
