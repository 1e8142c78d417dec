"""The MTP acceptance of the served model is the one in its card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.request import RequestStats
from tests.exactness.sweep import GREEDY, Setting, read_prompts, run

CARD_ACCEPTANCE = 0.831  # configs/minnow/MODEL_CARD.md: 64 tokens, EOS ignored, one draft a step, 200 prompts


def served(minnow: Path, k: int, stride: int) -> list[RequestStats]:
    prompts = read_prompts(minnow, "acceptance_prompts.jsonl")[::stride]
    sampling = replace(GREEDY, ignore_eos=True)
    return run(minnow, prompts, Setting(k=k, batch=8), [sampling] * len(prompts)).stats


def test_single_token_schedule(minnow: Path) -> None:
    stats = served(minnow, k=1, stride=1)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    print(f"k=1: {drafted} drafted, {accepted} accepted, acceptance {accepted / drafted:.4f}")  # noqa: T201
    assert abs(accepted / drafted - CARD_ACCEPTANCE) <= 0.01


@pytest.mark.slow
def test_three_drafts(minnow: Path) -> None:
    stats = served(minnow, k=3, stride=1)
    per_position = [
        sum(s.accepted_per_position[i] for s in stats) / sum(s.drafted_per_position[i] for s in stats)
        for i in range(3)
    ]
    print("k=3: accepted per position", [f"{p:.3f}" for p in per_position])  # noqa: T201
    assert per_position == sorted(per_position, reverse=True)
    assert per_position[0] > 0.7
