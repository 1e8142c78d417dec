"""Every setting gives the oracle's ids: a subset in `make test`, all of it in `make exactness`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.exactness.sweep import (
    GREEDY,
    Setting,
    assert_complete,
    assert_exact,
    compare,
    one_axis_at_a_time,
    pairwise,
    read_prompts,
    run,
    seeded,
)
from tests.oracles.hf import HfOracle

SHORT_PROMPT = 128
QUICK = [
    Setting(k=1, batch=8, storage="auto"),
    Setting(k=0, batch=8),
    Setting(k=1, batch=8),
    Setting(k=3, chunk=16, batch=32, schedule="settled"),
    Setting(k=2, small_pool=True, prefix_cache=False, batch=8),
]


@pytest.fixture(scope="module")
def oracle(minnow: Path) -> HfOracle:
    return HfOracle(minnow)


@pytest.mark.parametrize("setting", QUICK, ids=str)
def test_subset(oracle: HfOracle, minnow: Path, setting: Setting) -> None:
    prompts = read_prompts(minnow)[::10]
    check(oracle, minnow, prompts, setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [*one_axis_at_a_time(), *pairwise()], ids=str)
def test_all(oracle: HfOracle, minnow: Path, setting: Setting) -> None:
    check(oracle, minnow, read_prompts(minnow), setting)


@pytest.mark.parametrize(
    ("output", "complete"),
    [
        ([5, 6, 7], True), ([5, 1], True), ([1], True),
        ([], False), ([5, 6], False), ([5, 1, 7], False), ([5, 6, 7, 8], False),
    ],
)
def test_an_output_of_the_wrong_length_would_be_noticed(output: list[int], complete: bool) -> None:
    sampling = replace(GREEDY, max_tokens=3)
    with nullcontext() if complete else pytest.raises(AssertionError, match="should have ended"):
        assert_complete(output, sampling, (1,))


def check(oracle: HfOracle, minnow: Path, prompts: list[tuple[int, ...]], setting: Setting) -> None:
    if setting.small_pool and setting.chunk < 512:
        # Small chunks start requests so slowly that a pool for the longest prompt never runs short.
        prompts = [prompt for prompt in prompts if len(prompt) <= SHORT_PROMPT]
    for label, samplings in (("greedy", [GREEDY] * len(prompts)), ("seeded", seeded(len(prompts)))):
        outcome = run(minnow, prompts, setting, samplings)
        found = compare(oracle, prompts, outcome.outputs, samplings)
        print(f"{setting} {label}: {len(found)} ties, {outcome.num_preemptions} preemptions")  # noqa: T201
        for index, difference in found.items():
            print(f"  prompt {index}: {difference}")  # noqa: T201
        assert_exact(found, len(prompts), f"{setting} {label}")
        if setting.small_pool and setting.batch > 1:
            assert outcome.num_preemptions > 0, "the pool is not small enough to show anything"
