"""Any number of ranks, in one pass or two halves, gives the ids of the engine in a single process."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.request import SamplingParams
from tests.exactness.sweep import GREEDY, Setting, assert_exact, layouts, read_prompts, run, seeded
from tests.oracles.hf import HfOracle

QUICK = [
    Setting(tp=2, dp=2, split="on", batch=4),
    Setting(tp=4, k=3, chunk=16),
    Setting(dp=4, k=0),
    Setting(split="on", k=1),
]
Ids = list[list[int]]


class Reference:
    """Ids of the single process for each way of sampling, worked out once."""

    def __init__(self, model: Path, prompts: list[tuple[int, ...]]) -> None:
        self.prompts = prompts
        self.samplings = {"greedy": [GREEDY] * len(prompts), "seeded": seeded(len(prompts))}
        self.ids: dict[str, Ids] = {
            label: run(model, prompts, Setting(), samplings).outputs for label, samplings in self.samplings.items()
        }


@pytest.fixture(scope="module")
def some(minnow: Path) -> Reference:
    return Reference(minnow, read_prompts(minnow)[::30])


@pytest.fixture(scope="module")
def whole(minnow: Path) -> Reference:
    return Reference(minnow, read_prompts(minnow))


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_subset(minnow: Path, some: Reference, setting: Setting) -> None:
    check(minnow, some, setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", layouts(), ids=str)
def test_all(minnow: Path, whole: Reference, setting: Setting) -> None:
    check(minnow, whole, setting, processes=True)


def check(minnow: Path, reference: Reference, setting: Setting, *, processes: bool = False) -> None:
    for label, samplings in reference.samplings.items():
        outcome = run(minnow, reference.prompts, setting, samplings, processes=processes)
        different = [i for i, ids in enumerate(outcome.outputs) if ids != reference.ids[label][i]]
        print(f"{setting} {label}: {len(different)} differ, {outcome.num_preemptions} preemptions")  # noqa: T201
        if different:
            judge(minnow, reference, outcome.outputs, samplings, different, f"{setting} {label}")
        if setting.small_pool:
            assert outcome.num_preemptions > 0, "the pool is not small enough to show anything"


def judge(
    minnow: Path, reference: Reference, outputs: Ids, samplings: list[SamplingParams], different: list[int], label: str
) -> None:
    """Only where the oracle itself sees a tie may ids differ."""
    oracle = HfOracle(minnow)
    found = {}
    for i in different:
        difference = oracle.check(reference.prompts[i], outputs[i], samplings[i])
        if difference is not None:
            found[i] = difference
    assert_exact(found, len(outputs), label)
