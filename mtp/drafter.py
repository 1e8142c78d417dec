"""What proposes drafts: the protocol, and the MTP head as a drafter.

A drafter works on the same rows, positions and pages as the target. It carries tensors per slot from one step to the
next; whatever shapes its passes (attention metadata, caches) is handed through without being looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

RankSet = Literal["all", "leader"]
DrawDraft = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(i, raw logits [R, V] of draft i, drafts [R, i] before it) -> (tokens [R], processed logits [R, V])."""


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Drafts of R rows, and the processed logits that they were drawn from (None when no row needs them)."""

    token_ids: Tensor  # [R, k] int64
    logits: Tensor | None  # [R, k, V]


class Drafter(Protocol):
    """`lookahead`: how many tokens after a position its cache entry depends on. `ranks`: which ranks run it."""

    lookahead: int
    ranks: RankSet

    def carried_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes per slot of the float32 tensors that a step hands to the next."""
        ...

    def propose(
        self, k: int, carried: Mapping[str, Tensor], draw: DrawDraft, meta_at: Callable[[int], Any], kv: Any,
        *, keep_logits: bool,
    ) -> Drafts:
        """`k` drafts for each row of `carried`; `meta_at(i)` places the pass whose logits draw draft i >= 1."""
        ...

    def update(self, token_ids: Tensor, hidden: Tensor, meta: Any, kv: Any, carry_index: Tensor) -> dict[str, Tensor]:
        """Run over the target's rows after acceptance.

        token_ids [T] are the target's shifted left by one, hidden [T, hidden_size] the target's states; carry_index
        [C] picks the tokens after which a request goes on. Returns the carried tensors of those C requests.
        """
        ...


class Head(Protocol):
    """What an MTP head must offer (mtp/head.py)."""

    def forward(self, token_ids: Tensor, hidden: Tensor, meta: Any, kv: Any) -> Tensor: ...

    def logits(self, state: Tensor) -> Tensor: ...


class MtpDrafter:
    """One MTP head: the first draft from the carried logits, the others by passes of the head on its own states."""

    lookahead = 1
    ranks: RankSet = "all"

    def __init__(self, head: Head, *, vocab_size: int, hidden_size: int) -> None:
        self._head = head
        self._shapes = {"logits": (vocab_size,), "state": (hidden_size,)}

    def carried_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def propose(
        self, k: int, carried: Mapping[str, Tensor], draw: DrawDraft, meta_at: Callable[[int], Any], kv: Any,
        *, keep_logits: bool,
    ) -> Drafts:
        logits, state = carried["logits"], carried["state"]  # [R, V], [R, hidden_size]
        drafts = torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
        kept: list[Tensor] = []
        for i in range(k):
            if i > 0:
                state = self._head.forward(drafts[:, -1], state, meta_at(i), kv)
                logits = self._head.logits(state)
            tokens, processed = draw(i, logits, drafts)
            drafts = torch.cat((drafts, tokens.unsqueeze(1)), 1)
            kept.append(processed)
        return Drafts(token_ids=drafts, logits=torch.stack(kept, 1) if keep_logits and kept else None)

    def update(self, token_ids: Tensor, hidden: Tensor, meta: Any, kv: Any, carry_index: Tensor) -> dict[str, Tensor]:
        states = self._head.forward(token_ids, hidden, meta, kv)
        state = states[carry_index]
        return {"logits": self._head.logits(state), "state": state}
