"""run(plan) on a rank: drafts, target, acceptance, splice, drafter. Nothing in it waits for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mtp.accept import Acceptance, accept, draw
from mtp.drafter import Drafter, Drafts
from parallel.group import Group, SoloGroup
from runtime.attention.meta import AttentionMeta
from runtime.batch import Batch, build_batch, draft_metas
from runtime.device_state import DeviceState
from runtime.plan import StepPlan, StepResult
from runtime.row_share import RowShare
from runtime.sampling import Logprobs, TokenCounts, process, token_logprobs
from runtime.sampling_tables import SamplingRows

Publish = Callable[[StepResult], None]


class TargetModel(Protocol):
    """What the executor needs of a served model (runtime/models)."""

    def allocate_kv(self, num_pages: int, page_size: int) -> list[Tensor]: ...

    def forward(self, token_ids: Tensor, metas: Sequence[AttentionMeta], kv: list[Tensor]) -> Tensor:
        """[T] int64 -> [T, hidden_size] after the final norm, on every rank of the attention group."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] -> [n, vocab_size / tp]: this rank's part of the vocabulary."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """Rows that yield tokens, all of `q_len` positions: what was chosen, and what the target thought of it."""

    accepted: Acceptance
    token_ids: Tensor  # [R, q_len]: accepted drafts, then the next token; what follows means nothing
    logprobs: Logprobs | None


class Executor:
    """Runs one plan after the other over the model, its caches and the slot tables.

    `tp` is the attention group: all of its ranks run the same plans, and share the rows to be decided among them.
    `phase` is told what is being done, for whoever watches this rank.
    """

    def __init__(
        self, model: TargetModel, drafter: Drafter | None, state: DeviceState, num_pages: int, *,
        tp: Group | None = None, phase: Callable[[str], None] | None = None,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._state = state
        self._tp: Group = tp if tp is not None else SoloGroup("tp")
        self._phase = phase if phase is not None else _unwatched
        self._kv = model.allocate_kv(num_pages, state.page_size)

    @torch.inference_mode()
    def run(self, plan: StepPlan, publish: Publish) -> None:
        """One step. `publish` gets ids and counts as soon as acceptance has them, before the drafter runs."""
        state = self._state
        state.apply(plan)
        if plan.num_rows == 0:
            publish(PendingResult(plan, None, None, None).wait())
            return
        batch = build_batch(plan, state)
        share = RowShare(self._tp, plan.num_verify)
        self._phase("draft")
        drafts = self._propose(plan, batch, share) if plan.k and plan.num_verify else None
        if drafts is not None:
            draft_positions = batch.first_position.unsqueeze(1) + torch.arange(plan.k, device=state.device)
            state.put_tokens(batch.verify_slots.unsqueeze(1), draft_positions, drafts.token_ids)
        token_ids = state.tokens_at(batch.token_slots, batch.positions)
        self._phase("target")
        hidden = self._model.forward(token_ids, batch.metas, self._kv)  # [T, hidden_size]
        self._phase("accept")
        verified = self._verify(plan, batch, share, drafts, hidden) if plan.num_verify else None
        sampled = self._sample(plan, batch, hidden) if len(batch.sample_index) else None
        pending = PendingResult(plan, verified, sampled, _spoilt_chunks(plan, hidden))
        if state.device.type == "cpu":
            publish(pending.wait())
        self._phase("drafter")
        if self._drafter is not None:
            self._update_drafter(self._drafter, batch, hidden, verified)
        if state.device.type != "cpu":
            publish(pending.wait())  # the drafter is launched; the copy has run beside it

    def _propose(self, plan: StepPlan, batch: Batch, share: RowShare) -> Drafts:
        assert self._drafter is not None
        state = self._state
        slots, first_position = share.mine(batch.verify_slots), share.mine(batch.first_position)
        rows = self._rows(plan, share, slots)
        counts = self._counts(slots, rows)

        def draw_draft(i: int, shard: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            logits = share.whole_logits(shard.unsqueeze(1))
            processed = process(logits, rows, first_position, share.mine(before), counts, first=i).squeeze(1)
            return share.gather(draw(processed, rows.keys, first_position + i, draft=True)), processed

        return self._drafter.propose(
            plan.k, {name: table[batch.verify_slots] for name, table in state.carried.items()}, draw_draft,
            lambda i: draft_metas(state, batch, plan, i), self._kv, keep_logits=rows.keys.any_ratio,
        )

    def _verify(
        self, plan: StepPlan, batch: Batch, share: RowShare, drafts: Drafts | None, hidden: Tensor
    ) -> _Verdict:
        num_tokens = batch.num_verify * batch.q_len
        shard = self._model.logits(hidden[:num_tokens]).view(batch.num_verify, batch.q_len, -1)
        rows = self._rows(plan, share, share.mine(batch.verify_slots))
        return self._decide(plan, share, batch.verify_slots, batch.first_position, rows, shard, drafts)

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> _Verdict:
        """The first token of requests whose prompt ends in this step: a verify row without drafts."""
        slots = batch.sample_slots
        share = RowShare(self._tp, len(slots))
        host = plan.arrays
        sampling = (np.arange(plan.num_rows) >= plan.num_verify) & (host.samples != 0)
        rows = self._state.sampling.gather(share.mine(slots), share.mine_on_host(host.slots[sampling]))
        shard = self._model.logits(hidden[batch.sample_index]).unsqueeze(1)
        return self._decide(plan, share, slots, self._state.committed[slots], rows, shard, None)

    def _decide(
        self, plan: StepPlan, share: RowShare, slots: Tensor, first_position: Tensor, rows: SamplingRows,
        shard: Tensor, drafts: Drafts | None,
    ) -> _Verdict:
        """Judge this rank's rows, exchange the outcome, write it into the tables and move the committed lengths on."""
        draft_ids = drafts.token_ids if drafts is not None else slots.new_zeros((len(slots), 0))  # [R, k]
        logits = share.whole_logits(shard)  # [r, q_len, V]
        my_slots, my_first, my_drafts = share.mine(slots), share.mine(first_position), share.mine(draft_ids)
        room = torch.minimum(self._state.limit[my_slots] - my_first - 1, rows.max_drafts)
        mine = accept(
            process(logits, rows, my_first, my_drafts, self._counts(my_slots, rows)), my_drafts,
            drafts.logits if drafts is not None else None, rows.keys, my_first, room.clamp(0, draft_ids.shape[1]),
        )
        outcome = _share_outcome(share, mine)
        token_ids = _with_next(draft_ids, outcome)  # [R, q_len]
        self._state.put_tokens(slots, first_position + outcome.num_accepted, outcome.next_token)
        if self._state.penalties.num_slots_in_use:
            self._state.penalties.commit(slots, token_ids, outcome.num_accepted + 1)
        self._state.advance(slots, outcome.num_accepted + 1)
        logprobs = None
        if plan.num_logprobs >= 0:
            found = token_logprobs(logits, share.mine(token_ids), plan.num_logprobs)
            logprobs = Logprobs(
                chosen=share.gather(found.chosen), top_ids=share.gather(found.top_ids), top=share.gather(found.top)
            )
        return _Verdict(accepted=outcome, token_ids=token_ids, logprobs=logprobs)

    def _rows(self, plan: StepPlan, share: RowShare, slots: Tensor) -> SamplingRows:
        return self._state.sampling.gather(slots, share.mine_on_host(plan.arrays.slots[: plan.num_verify]))

    def _update_drafter(self, drafter: Drafter, batch: Batch, hidden: Tensor, verified: _Verdict | None) -> None:
        """Splice and run: the token after each position, committed where it can be, else the row's newest."""
        state = self._state
        newest = state.committed[batch.token_slots] - 1
        token_ids = state.tokens_at(batch.token_slots, torch.minimum(batch.positions + 1, newest))
        carry_slots, carry_index = batch.carry_slots, batch.carry_index
        if verified is not None:
            first = torch.arange(batch.num_verify, device=state.device) * batch.q_len
            carry_index = torch.cat((first + verified.accepted.num_accepted, carry_index))
            carry_slots = torch.cat((batch.verify_slots, carry_slots))
        carried = drafter.update(token_ids, hidden, batch.metas, self._kv, carry_index)
        for name, values in carried.items():
            state.carried[name][carry_slots] = values

    def _counts(self, slots: Tensor, rows: SamplingRows) -> TokenCounts | None:
        if not rows.uses.penalties:
            return None
        output, in_prompt = self._state.penalties.gather(slots)
        return TokenCounts(output=output, in_prompt=in_prompt)


def _unwatched(_phase: str) -> None:
    """Nobody watches."""


def _share_outcome(share: RowShare, mine: Acceptance) -> Acceptance:
    """[r] of each rank -> [R] on all of them, in one exchange."""
    if share.is_whole:
        return mine
    packed = torch.stack((mine.num_accepted, mine.next_token, mine.bad.long()), 1)  # [r, 3]
    num_accepted, next_token, bad = share.gather(packed).unbind(1)
    return Acceptance(num_accepted=num_accepted, next_token=next_token, bad=bad != 0)


def _with_next(draft_ids: Tensor, outcome: Acceptance) -> Tensor:
    """[R, k] drafts -> [R, 1 + k]: the accepted ones, then the next token; what follows means nothing."""
    next_token = outcome.next_token.unsqueeze(1)
    steps = torch.arange(draft_ids.shape[1] + 1, device=draft_ids.device)
    padded = torch.cat((draft_ids, next_token), 1)
    return torch.where(steps >= outcome.num_accepted.unsqueeze(1), next_token, padded)


class PendingResult:
    """Ids and counts of a step on their way to the host: the copies start here and end in `wait`."""

    def __init__(
        self, plan: StepPlan, verified: _Verdict | None, sampled: _Verdict | None, spoilt_chunks: Tensor | None
    ) -> None:
        self._plan = plan
        sample_rows = np.flatnonzero(plan.arrays.samples[plan.num_verify :]) + plan.num_verify
        parts: list[tuple[np.ndarray, dict[str, Tensor]]] = []
        if verified is not None:
            parts.append((np.arange(plan.num_verify), _tensors(verified)))
        if sampled is not None:
            parts.append((sample_rows, _tensors(sampled)))
        if spoilt_chunks is not None:
            parts.append((np.arange(plan.num_verify, plan.num_rows), {"bad": spoilt_chunks}))
        self._parts = [(rows, _to_host(tensors)) for rows, tensors in parts]
        self._event = None
        if any(t.is_cuda for _, ts in parts for t in ts.values()):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> StepResult:
        """The result in plan order, as host arrays."""
        if self._event is not None:
            self._event.synchronize()
        plan = self._plan
        num_rows, q_len, num_top = plan.num_rows, 1 + plan.k, max(plan.num_logprobs, 0)
        arrays = {
            "counts": np.zeros(num_rows, np.int32),
            "token_ids": np.zeros((num_rows, q_len), np.int32),
            "bad": np.zeros(num_rows, bool),
        }
        if plan.num_logprobs >= 0:
            arrays["chosen_logprobs"] = np.zeros((num_rows, q_len), np.float32)
            arrays["top_ids"] = np.zeros((num_rows, q_len, num_top), np.int32)
            arrays["top_logprobs"] = np.zeros((num_rows, q_len, num_top), np.float32)
        for rows, tensors in self._parts:
            for name, tensor in tensors.items():
                values = tensor.numpy()
                if name == "bad":
                    arrays[name][rows] |= values
                elif values.ndim == 1:
                    arrays[name][rows] = values
                else:
                    arrays[name][rows, : values.shape[1]] = values
        return StepResult(step_id=plan.step_id, **arrays)


def _spoilt_chunks(plan: StepPlan, hidden: Tensor) -> Tensor | None:
    """[P] bool: prefill rows with a state that is not finite. Logits tell of a chunk's last token at most, and the
    cache takes only finite values, so that without this a NaN would end in plausible tokens."""
    counts = plan.arrays.num_tokens[plan.num_verify :].tolist()
    if not counts:
        return None
    spoilt = ~hidden[-sum(counts) :].sum(1).isfinite()  # a sum is finite only if its terms are
    return torch.stack([chunk.any() for chunk in torch.split(spoilt, counts)])


def _tensors(verdict: _Verdict) -> dict[str, Tensor]:
    tensors = {
        "counts": verdict.accepted.num_accepted + 1, "token_ids": verdict.token_ids, "bad": verdict.accepted.bad
    }
    if verdict.logprobs is not None:
        tensors["chosen_logprobs"] = verdict.logprobs.chosen
        tensors["top_ids"], tensors["top_logprobs"] = verdict.logprobs.top_ids, verdict.logprobs.top
    return tensors


def _to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, on their way to pinned host memory if they are on a device."""
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return tensors
    pinned = {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for name, t in tensors.items()}
    return {name: buffer.copy_(tensors[name], non_blocking=True) for name, buffer in pinned.items()}
