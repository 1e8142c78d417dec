"""In which order two halves take turns, and how much of their exchanges that hides, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe.dispatcher import AllGatherDispatcher, AllToAllDispatcher, DispatchKind
from parallel.group import Pending, PendingRows, SoloGroup
from parallel.ledger import Ledger
from runtime.models.decoder import DecoderLayer
from runtime.overlap import run_layers
from tests.small_layers import HIDDEN, NUM_EXPERTS, LayerWeights, empty_caches, half

KINDS: list[DispatchKind] = ["all_to_all", "all_gather"]
EXCHANGES = ("tokens", "results")


@dataclass(frozen=True)
class Costs:
    """Time a whole layer's parts take (each half: half of it), and each exchange."""

    attention: float = 0.0
    shared: float = 0.0
    experts: float = 0.0
    latency: float = 0.0

    def of(self, part: str) -> float:
        return float(getattr(self, part))


class Diary:
    """What one rank did, in order, as `half: event`, and a clock that parts and waits move on."""

    def __init__(self, kind: DispatchKind, costs: Costs, num_halves: int) -> None:
        self.kind, self.costs, self.num_halves = kind, costs, num_halves
        self.ledger = Ledger()
        self.lines: list[str] = []
        self.now = 0.0

    def note(self, event: str) -> None:
        self.lines.append(f"{'AB'[self.ledger.half]}: {event}")


class RecordingGroup(SoloGroup):
    """Notes when exchanges start and when they are waited for; names them by their order within layer and half."""

    def __init__(self, diary: Diary) -> None:
        super().__init__("ep")
        self._diary, self._counts = diary, [0, 0]

    def all_gather(self, x: Tensor) -> Pending:
        return self._begin(x)

    def all_to_all(self, x: Tensor) -> Pending:
        return self._begin(x)

    def all_to_all_uneven(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return self._begin(x)

    def all_to_all_sized(self, x: Tensor, send: Sequence[int], most: int) -> PendingRows:
        return _RecordedRows(self._begin(x), list(send))

    def _begin(self, x: Tensor) -> Pending:
        half_idx = self._diary.ledger.half
        name = EXCHANGES[self._counts[half_idx] % len(EXCHANGES)]
        self._counts[half_idx] += 1
        self._diary.note(f">{name}")
        return _Recorded(self._diary, name, x)


class _Recorded:
    def __init__(self, diary: Diary, name: str, result: Tensor) -> None:
        self._diary, self._name, self._result = diary, name, result
        self._ready = diary.now + diary.costs.latency

    def wait(self) -> Tensor:
        self._diary.note(f"{self._name}>")
        self._diary.now = max(self._diary.now, self._ready)
        return self._result


class _RecordedRows:
    def __init__(self, pending: Pending, counts: list[int]) -> None:
        self._pending, self._counts = pending, counts

    def wait(self) -> tuple[Tensor, list[int]]:
        return self._pending.wait(), self._counts


class Noted:
    """A part of a layer that notes that it runs, and takes its time."""

    def __init__(self, diary: Diary, name: str, part: Callable[..., Tensor]) -> None:
        self._diary, self._name, self._part = diary, name, part

    def __call__(self, *inputs: object) -> Tensor:
        self._diary.note(self._name)
        self._diary.now += self._diary.costs.of(self._name) / self._diary.num_halves
        return self._part(*inputs)


def noted_layer(diary: Diary, kv_idx: int, patch: pytest.MonkeyPatch) -> DecoderLayer:
    group = RecordingGroup(diary)
    make = AllGatherDispatcher if diary.kind == "all_gather" else AllToAllDispatcher
    weights = LayerWeights(kv_idx)
    moe = weights.moe(group, make(group, NUM_EXPERTS))
    layer = weights.decoder(kv_idx, SoloGroup("tp"), moe)
    parts: list[tuple[object, str]] = [(moe, "experts"), (moe, "shared"), (layer, "attention")]
    for owner, name in parts:
        patch.setattr(owner, f"_{name}", Noted(diary, name, getattr(owner, f"_{name}")))
    return layer


def run(
    kind: DispatchKind, num_layers: int, num_halves: int, patch: pytest.MonkeyPatch, costs: Costs | None = None
) -> Diary:
    diary = Diary(kind, costs or Costs(), num_halves)
    layers = [noted_layer(diary, i, patch) for i in range(num_layers)]
    halves = [half(torch.ones(2, HIDDEN), 2, 0, empty_caches(num_layers, 2), None) for _ in range(num_halves)]
    with torch.inference_mode():
        run_layers(layers, halves, diary.ledger)
    return diary


TURNS = """
A: attention
A: >tokens
B: attention
B: >tokens
A: shared
A: tokens>
A: experts
A: >results
B: tokens>
B: experts
B: >results
B: shared
A: results>
A: attention
A: >tokens
B: results>
B: attention
B: >tokens
""".strip().splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exchange_of_one_half_travels_while_the_other_computes(
    kind: DispatchKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run(kind, 2, 2, monkeypatch).lines
    assert lines[: len(TURNS)] == TURNS
    assert lines[len(TURNS) :] == [*TURNS[4:12], "A: results>", "B: results>"]


@pytest.mark.parametrize(("attention", "experts"), [(4.0, 4.0), (2.0, 6.0), (6.0, 2.0)])
def test_what_is_shorter_than_a_part_and_a_shared_expert_is_hidden(
    attention: float, experts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are of whole layers, each half's is half of it; only the first and the last layer show anything."""
    shared = 1.0
    longest = (min(attention, experts) + shared) / 2
    for latency, hidden in ((longest, True), (longest + 0.5, False)):
        costs = Costs(attention=attention, shared=shared, experts=experts, latency=latency)
        many, few = (run("all_gather", num_layers, 2, monkeypatch, costs).now for num_layers in (12, 4))
        assert (many - few == pytest.approx(8 * (attention + shared + experts))) == hidden


def test_one_half_runs_its_shared_expert_while_tokens_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run("all_to_all", 2, 1, monkeypatch).lines
    alone = [line for line in TURNS[:12] if line.startswith("A")]
    assert lines == [*alone, "A: results>"] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("latency", [0.25, 0.5, 1.0])
def test_two_halves_hide_nine_tenths_of_what_can_be_hidden(
    kind: DispatchKind, latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against one pass, whose exchanges are all exposed but for what its own shared expert covers."""
    num_layers, costs = 20, Costs(attention=4.0, shared=1.0, experts=4.0, latency=latency)
    one = run(kind, num_layers, 1, monkeypatch, costs).now
    two = run(kind, num_layers, 2, monkeypatch, costs).now
    compute = num_layers * 9.0
    assert one >= compute + num_layers * (len(EXCHANGES) - 1) * latency
    assert one - two >= 0.9 * (one - compute)


def test_without_latency_two_halves_take_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(attention=4.0, shared=1.0, experts=4.0)
    assert run("all_to_all", 3, 2, monkeypatch, costs).now == 27.0 == run("all_to_all", 3, 1, monkeypatch, costs).now
