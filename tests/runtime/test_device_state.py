"""The slot tables: masked writes, the scratch column, and the debug mode that notices what was never written."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.device_state import DeviceState
from runtime.plan import StepPlan
from tests.runtime.simulated_rank import SimulatedRank, enqueue, new_scheduler


def new_state(*, debug: bool) -> DeviceState:
    return DeviceState(
        num_slots=5, max_model_len=10, page_size=4, vocab_size=50, carried_shapes={"state": (2,)},
        device=torch.device("cpu"), debug=debug,
    )


def plans(*prompts: list[int], max_tokens: int = 3) -> list[StepPlan]:
    """The plans of these requests up to their end."""
    scheduler = new_scheduler(max_model_len=10, num_pages=20)
    rank = SimulatedRank(scheduler, random.Random(0))
    live = [enqueue(scheduler, prompt, max_tokens) for prompt in prompts]
    while live:
        for row in rank.step():
            if len(row.state.tokens) == row.state.limit:
                scheduler.finish(row.state)
                live.remove(row.state)
    enqueue(scheduler, [9, 9], 2)  # its plan carries the freed slots
    rank.step()
    return rank.plans


def test_a_new_request_fills_its_slot() -> None:
    state = new_state(debug=True)
    plan = plans([11, 12, 13, 14, 15], [21])[0]
    state.apply(plan)
    first, second = plan.arrays.new_slots.tolist()
    assert state.committed[[first, second]].tolist() == [5, 1]
    assert state.limit[[first, second]].tolist() == [8, 4]
    assert state.tokens_at(torch.tensor([first] * 5), torch.arange(5)).tolist() == [11, 12, 13, 14, 15]
    granted = plan.arrays.pages[plan.arrays.page_slots == first]
    assert len(granted) == 2
    assert state.page_table[first].tolist() == [*granted.tolist(), 0]


def test_positions_at_or_past_the_limit_are_written_to_the_dummy_page() -> None:
    state = new_state(debug=False)
    plan = plans([11, 12, 13, 14, 15], max_tokens=1)[0]  # a limit of 6, in the middle of its second page
    state.apply(plan)
    slot = plan.arrays.new_slots[0]
    positions = torch.tensor([0, 3, 4, 5, 6, 7, 8, 10, 25])
    index = state.write_index(torch.full_like(positions, int(slot)), positions)
    first, second = state.page_table[slot].tolist()[:2]
    assert index.tolist() == [4 * first, 4 * first + 3, 4 * second, 4 * second + 1, 2, 3, 0, 2, 1]


def test_tokens_past_the_context_go_to_one_scratch_column() -> None:
    state = new_state(debug=False)
    before = state.tokens.clone()
    slots = torch.tensor([1, 1, 2])
    state.put_tokens(slots, torch.tensor([10, 30, 12]), torch.tensor([5, 6, 7]))
    assert torch.equal(state.tokens[:, :10], before[:, :10])
    state.put_tokens(slots[:1], torch.tensor([9]), torch.tensor([8]))
    assert state.tokens_at(slots[:1], torch.tensor([9])).tolist() == [8]


def test_committed_lengths_never_pass_the_limit() -> None:
    state = new_state(debug=False)
    state.apply(plans([11, 12, 13, 14, 15])[0])
    slot = torch.tensor([int(plans([11, 12, 13, 14, 15])[0].arrays.new_slots[0])])
    for expected in (7, 8, 8):
        state.advance(slot, torch.tensor([2]))
        assert state.committed[slot].tolist() == [expected]


@pytest.mark.parametrize("debug", [True, False])
def test_debug_mode_notices_what_was_never_written_and_what_was_freed(debug: bool) -> None:
    state = new_state(debug=debug)
    steps = plans([11, 12, 13, 14, 15])
    state.apply(steps[0])
    slot = torch.tensor([int(steps[0].arrays.new_slots[0])])

    def read(position: int) -> None:
        state.tokens_at(slot, torch.tensor([position]))

    read(4)
    state.carried["state"][slot] = 1.0
    for plan in steps[1:-1]:
        state.apply(plan)
    freeing = steps[-1]
    assert freeing.arrays.freed_slots.tolist() == slot.tolist()
    if not debug:
        read(7)
        return
    with pytest.raises(AssertionError, match="read before it was written"):
        read(7)
    freed_only = StepPlan(
        step_id=99, k=1, num_verify=0, num_logprobs=-1, split=False,
        arrays=type(freeing.arrays)(
            **{name: getattr(freeing.arrays, name)[:0] for name in freeing.arrays.__dict__}
            | {"freed_slots": freeing.arrays.freed_slots}
        ),
    )
    state.apply(freed_only)
    with pytest.raises(AssertionError, match="read before it was written"):
        read(4)
    assert state.carried["state"][slot].isnan().all()
    assert state.page_table[slot].tolist() == [[0, 0, 0]]
    assert state.committed[slot].tolist() == [0]
