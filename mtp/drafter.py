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
"""(i, this rank's part of the raw logits of draft i [R, V / tp], drafts [R, i] before it)
-> (tokens [R], processed logits [r, V] of the r rows that this rank decides)."""


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Drafts of R rows; the processed logits that they were drawn from, of this rank's r rows (None: not needed)."""

    token_ids: Tensor  # [R, k] int64
    logits: Tensor | None  # [r, k, V]


class Drafter(Protocol):
    """`lookahead`: how many tokens after a position its cache entry depends on. `ranks`: which ranks run it."""

    lookahead: int
    ranks: RankSet

    def carried_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes per slot of the float32 tensors that a step hands to the next."""
        ...

    def propose(
        self, k: int, carried: Mapping[str, Tensor], draw: DrawDraft, metas_at: Callable[[int], Any], kv: Any,
        *, keep_logits: bool,
    ) -> Drafts:
        """`k` drafts for each row of `carried`; `metas_at(i)` places the pass whose logits draw draft i >= 1."""
        ...

    def update(self, token_ids: Tensor, hidden: Tensor, metas: Any, kv: Any, carry_index: Tensor) -> dict[str, Tensor]:
        """Run over the target's rows after acceptance.

        token_ids [T] are the target's shifted left by one, hidden [T, hidden_size] the target's states; carry_index
        [C] picks the tokens after which a request goes on. Returns the carried tensors of those C requests.
        """
        ...


class Head(Protocol):
    """What an MTP head must offer (mtp/head.py)."""

    def forward(self, token_ids: Tensor, hidden: Tensor, metas: Any, kv: Any) -> Tensor: ...

    def logits(self, state: Tensor) -> Tensor: ...


class MtpDrafter:
    """One MTP head: the first draft from the carried state, the others by passes of the head on its own states."""

    lookahead = 1
    ranks: RankSet = "all"

    def __init__(self, head: Head, *, hidden_size: int) -> None:
        self._head = head
        self._shapes = {"state": (hidden_size,)}

    def carried_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def propose(
        self, k: int, carried: Mapping[str, Tensor], draw: DrawDraft, metas_at: Callable[[int], Any], kv: Any,
        *, keep_logits: bool,
    ) -> Drafts:
        state = carried["state"]  # [R, hidden_size]
        drafts = torch.empty((len(state), 0), dtype=torch.int64, device=state.device)
        kept: list[Tensor] = []
        for i in range(k):
            if i > 0:
                state = self._head.forward(drafts[:, -1], state, metas_at(i), kv)
            tokens, processed = draw(i, self._head.logits(state), drafts)
            drafts = torch.cat((drafts, tokens.unsqueeze(1)), 1)
            kept.append(processed)
        return Drafts(token_ids=drafts, logits=torch.stack(kept, 1) if keep_logits and kept else None)

    def update(self, token_ids: Tensor, hidden: Tensor, metas: Any, kv: Any, carry_index: Tensor) -> dict[str, Tensor]:
        return {"state": self._head.forward(token_ids, hidden, metas, kv)[carry_index]}
