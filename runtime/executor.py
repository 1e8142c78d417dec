"""run(plan) on a rank: drafts, target, acceptance, splice, drafter. Nothing in it waits for the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mtp.accept import Acceptance, accept, draw
from mtp.drafter import Drafter, Drafts
from runtime.attention.meta import AttentionMeta, KvSpec
from runtime.batch import Batch, build_batch, draft_meta
from runtime.device_state import DeviceState
from runtime.plan import StepPlan, StepResult
from runtime.sampling import Logprobs, TokenCounts, process, token_logprobs
from runtime.sampling_tables import SamplingRows

Publish = Callable[[StepResult], None]


class TargetModel(Protocol):
    """What the executor needs of a served model (runtime/models)."""

    @property
    def kv_spec(self) -> KvSpec: ...

    def allocate_kv(self, num_pages: int, page_size: int) -> list[Tensor]: ...

    def forward(self, token_ids: Tensor, meta: AttentionMeta, kv: list[Tensor]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """Rows that yield tokens, all of `q_len` positions: what was chosen, and what the target thought of it."""

    accepted: Acceptance
    token_ids: Tensor  # [R, q_len]: accepted drafts, then the next token; what follows means nothing
    logprobs: Logprobs | None


class Executor:
    """Runs one plan after the other over the model, its caches and the slot tables."""

    def __init__(self, model: TargetModel, drafter: Drafter | None, state: DeviceState, num_pages: int) -> None:
        self._model = model
        self._drafter = drafter
        self._state = state
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
        rows = state.sampling.gather(batch.verify_slots, plan.arrays.slots[: plan.num_verify])
        drafts = self._propose(plan, batch, rows) if plan.k and plan.num_verify else None
        if drafts is not None:
            draft_positions = batch.first_position.unsqueeze(1) + torch.arange(plan.k, device=state.device)
            state.put_tokens(batch.verify_slots.unsqueeze(1), draft_positions, drafts.token_ids)
        token_ids = state.tokens_at(batch.token_slots, batch.positions)
        hidden = self._model.forward(token_ids, batch.meta, self._kv)  # [T, hidden_size]
        verified = self._verify(plan, batch, rows, drafts, hidden) if plan.num_verify else None
        sampled = self._sample(plan, batch, hidden) if len(batch.sample_index) else None
        pending = PendingResult(plan, verified, sampled, _spoilt_chunks(plan, hidden))
        if state.device.type == "cpu":
            publish(pending.wait())
        if self._drafter is not None:
            self._update_drafter(self._drafter, batch, hidden, verified)
        if state.device.type != "cpu":
            publish(pending.wait())  # the drafter is launched; the copy has run beside it

    def _propose(self, plan: StepPlan, batch: Batch, rows: SamplingRows) -> Drafts:
        assert self._drafter is not None
        state = self._state
        counts = self._counts(batch.verify_slots, rows)

        def draw_draft(i: int, logits: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            processed = process(logits.unsqueeze(1), rows, batch.first_position, before, counts, first=i).squeeze(1)
            return draw(processed, rows.keys, batch.first_position + i, draft=True), processed

        return self._drafter.propose(
            plan.k, {name: table[batch.verify_slots] for name, table in state.carried.items()}, draw_draft,
            lambda i: draft_meta(state, batch, plan, i), self._kv, keep_logits=rows.keys.any_ratio,
        )

    def _verify(
        self, plan: StepPlan, batch: Batch, rows: SamplingRows, drafts: Drafts | None, hidden: Tensor
    ) -> _Verdict:
        num_tokens = batch.num_verify * batch.q_len
        logits = self._model.logits(hidden[:num_tokens]).view(batch.num_verify, batch.q_len, -1)
        limit = self._state.limit[batch.verify_slots]
        room = torch.minimum(limit - batch.first_position - 1, rows.max_drafts).clamp(0, plan.k)
        return self._decide(plan, batch.verify_slots, batch.first_position, rows, logits, drafts, room)

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> _Verdict:
        """The first token of requests whose prompt ends in this step: a verify row without drafts."""
        slots = batch.sample_slots
        host = plan.arrays
        sampling = (np.arange(plan.num_rows) >= plan.num_verify) & (host.samples != 0)
        rows = self._state.sampling.gather(slots, host.slots[sampling])
        logits = self._model.logits(hidden[batch.sample_index]).unsqueeze(1)
        return self._decide(
            plan, slots, self._state.committed[slots], rows, logits, None, torch.zeros_like(slots)
        )

    def _decide(
        self, plan: StepPlan, slots: Tensor, first_position: Tensor, rows: SamplingRows, logits: Tensor,
        drafts: Drafts | None, room: Tensor,
    ) -> _Verdict:
        """Judge, write the outcome into the tables, and move the committed lengths on."""
        draft_ids = drafts.token_ids if drafts is not None else slots.new_zeros((len(slots), 0))
        processed = process(logits, rows, first_position, draft_ids, self._counts(slots, rows))
        outcome = accept(
            processed, draft_ids, drafts.logits if drafts is not None else None, rows.keys, first_position, room
        )
        steps = torch.arange(draft_ids.shape[1] + 1, device=slots.device)
        padded = torch.cat((draft_ids, outcome.next_token.unsqueeze(1)), 1)
        is_next = steps >= outcome.num_accepted.unsqueeze(1)
        token_ids = torch.where(is_next, outcome.next_token.unsqueeze(1), padded)  # [R, q_len]
        self._state.put_tokens(slots, first_position + outcome.num_accepted, outcome.next_token)
        if rows.uses.penalties:
            self._state.penalties.commit(slots, token_ids, outcome.num_accepted + 1)
        self._state.advance(slots, outcome.num_accepted + 1)
        logprobs = token_logprobs(logits, token_ids, plan.num_logprobs) if plan.num_logprobs >= 0 else None
        return _Verdict(accepted=outcome, token_ids=token_ids, logprobs=logprobs)

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
        carried = drafter.update(token_ids, hidden, batch.meta, self._kv, carry_index)
        for name, values in carried.items():
            state.carried[name][carry_slots] = values

    def _counts(self, slots: Tensor, rows: SamplingRows) -> TokenCounts | None:
        if not rows.uses.penalties:
            return None
        output, in_prompt = self._state.penalties.gather(slots)
        return TokenCounts(output=output, in_prompt=in_prompt)


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
