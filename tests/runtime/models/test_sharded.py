"""A model cut over ranks equals the model alone: target and MTP head, prefill and decode, one and two halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe.dispatcher import DispatchKind
from parallel.layout import Layout, RankGroups
from runtime.attention.meta import AttentionMeta
from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.models.passes import local_dummy
from runtime.weights import WeightSource
from tests.meta_builder import Row, build_meta
from tests.runtime.models.checkpoints import make_oracle, save
from tests.thread_group import run_ranks

MINNOW = Path(__file__).parents[3] / "configs" / "minnow"
PAGE_SIZE, NUM_PAGES = 4, 24
TOLERANCE = 1e-4
PAGES = ([5, 2, 9, 14, 1], [3, 7, 11, 15, 16], [4, 17, 6, 18, 19], [20, 8, 21, 10, 22])

Half = tuple[list[Row], list[Row]]  # decode rows, prefill rows
Pass = tuple[Half, Half]
Result = dict[str, Tensor]


def row(request: int, start: int, end: int) -> Row:
    return Row(start, end - start, PAGES[request])


# What each dp group runs, step by step. The first mixes rows of every kind, the second has a token at most in a half.
SCRIPTS: tuple[list[Pass], ...] = (
    [
        (([], [row(0, 0, 9), row(1, 0, 2)]), ([], [row(2, 0, 5)])),
        (([row(0, 9, 11)], []), ([row(1, 2, 4), row(2, 5, 7)], [])),
        (([row(0, 11, 15)], []), ([row(2, 7, 11)], [])),
        (([row(0, 15, 16), row(1, 4, 5)], [row(3, 0, 4)]), ([], [row(3, 4, 10)])),  # a chunk cut between the halves
        (([row(2, 11, 12)], []), ([], [])),
    ],
    [
        (([], [row(0, 0, 1)]), ([], [])),
        (([row(0, 1, 2)], []), ([], [])),
        (([], []), ([row(0, 2, 3)], [])),
        (([row(0, 3, 4)], []), ([], [])),
        (([], []), ([row(0, 4, 5)], [])),
    ],
)


@dataclass(frozen=True)
class Case:
    """A checkpoint, and what its model gives alone for every pass of every script."""

    folder: Path
    expected: list[list[Result]]  # per dp group, per pass


def load(folder: Path, groups: RankGroups | None = None, dispatch: DispatchKind = "auto") -> DeepseekModel:
    with WeightSource(folder) as source:
        return DeepseekModel.load(
            source, load_model_config(folder), groups=groups, storage="float32", dispatch=dispatch
        )


def metas_of(halves: Pass, num_halves: int) -> list[AttentionMeta]:
    if num_halves == 1:
        (decode_a, prefill_a), (decode_b, prefill_b) = halves
        halves_run: Sequence[Half] = [(decode_a + decode_b, prefill_a + prefill_b)]
    else:
        halves_run = halves
    return [build_meta(PAGE_SIZE, *half) for half in halves_run]


def run_script(model: DeepseekModel, group: int, num_halves: int, num_groups: int = 1) -> list[Result]:
    generator = torch.Generator().manual_seed(7 + group)
    kv = model.allocate_kv(NUM_PAGES, PAGE_SIZE)
    results = []
    for step, halves in enumerate(SCRIPTS[group]):
        metas = metas_of(halves, num_halves)
        if num_groups > 1:
            others = [metas_of(SCRIPTS[g][step], num_halves) for g in range(num_groups)]
            most = [max(m.num_tokens for m in half) for half in zip(*others, strict=True)]
            metas = [replace(meta, capacity=capacity) for meta, capacity in zip(metas, most, strict=True)]
        num_tokens = sum(meta.num_tokens for meta in metas)
        token_ids = torch.randint(3, model.config.vocab_size, (2, num_tokens), generator=generator)
        hidden = model.forward(token_ids[0], metas, kv)
        result = {"hidden": hidden, "logits": model.logits(hidden)}
        if model.mtp is not None:
            states = model.mtp.forward(token_ids[1], hidden, metas, kv)
            result |= {"states": states, "drafts": model.mtp.logits(states)}
        results.append(result)
    return results


def make_case(folder: Path) -> Case:
    with torch.inference_mode():
        model = load(folder)
        return Case(folder, [run_script(model, group, 1) for group in range(len(SCRIPTS))])


def check(case: Case, layout: Layout, num_halves: int, dispatch: DispatchKind = "auto") -> None:
    def work(rank: int, groups: RankGroups) -> list[Result]:
        model = load(case.folder, groups, dispatch)
        return run_script(model, layout.dp_rank(rank), num_halves, layout.dp)

    results = run_ranks(layout, work)
    for group in range(layout.dp):
        ranks = results[group * layout.tp : (group + 1) * layout.tp]
        for step, expected in enumerate(case.expected[group]):
            for name, values in expected.items():
                parts = [rank[step][name] for rank in ranks]
                if name in ("logits", "drafts"):  # by vocabulary, in order of rank
                    assert_close(torch.cat(parts, 1), values)
                else:  # whole on every rank, and the same to the last bit
                    assert all(torch.equal(part, parts[0]) for part in parts)
                    assert_close(parts[0], values)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() <= TOLERANCE
    assert expected.std() > 0.1  # a constant would pass for anything


@pytest.fixture(scope="module")
def minnow() -> Case:
    return make_case(MINNOW)


@pytest.mark.parametrize("num_halves", [1, 2])
@pytest.mark.parametrize("layout", [(1, 2), (1, 4), (2, 1), (2, 2)], ids=str)
def test_minnow(minnow: Case, layout: tuple[int, int], num_halves: int) -> None:
    assert "drafts" in minnow.expected[0][0]
    check(minnow, Layout(dp=layout[0], tp=layout[1]), num_halves)


def test_minnow_with_dispatch_by_all_gather(minnow: Case) -> None:
    check(minnow, Layout(dp=2, tp=2), 2, "all_gather")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("v3_wide", (2, 2)),  # experts in their own products, attention that is not folded
        ("v3_yarn_plain_query", (1, 4)),
        ("v3_one_group_tied", (1, 2)),
        ("v2_group_limited_yarn", (2, 1)),
        ("v3_all_dense", (1, 4)),
    ],
)
def test_other_models(name: str, layout: tuple[int, int], tmp_path: Path) -> None:
    case = make_case(save(make_oracle(name), tmp_path))
    check(case, Layout(dp=layout[0], tp=layout[1]), 2)


def test_two_halves_alone(minnow: Case) -> None:
    model = load(MINNOW)
    with torch.inference_mode():
        results = run_script(model, 0, 2)
    for got, expected in zip(results, minnow.expected[0], strict=True):
        for name, values in expected.items():
            assert_close(got[name], values)


def test_no_expert_sees_padding_or_dummy_rows() -> None:
    meta = build_meta(PAGE_SIZE, [], [row(0, 0, 5)])
    with_dummy = replace(meta, dummy=torch.tensor([False, True, False, False, True]))

    def work(rank: int, groups: RankGroups) -> list[list[bool] | None]:
        masks = [local_dummy(m, groups.tp) for m in (meta, with_dummy, build_meta(PAGE_SIZE, [], [row(0, 0, 4)]))]
        return [None if mask is None else mask.tolist() for mask in masks]

    first, second = run_ranks(Layout(tp=2), work)
    assert first == [[False] * 3, [False, True, False], None]
    assert second == [[False, False, True], [False, True, True], None]
