"""Acceptance, row by row, against a loop in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp.accept import Acceptance, DrawKeys, Method, accept, draw
from mtp.noise import Purpose, gumbel, uniform

INF, NAN = math.inf, math.nan


def _keys(methods: list[int], first_seed: int = 0) -> DrawKeys:
    num_rows = len(methods)
    return DrawKeys(
        method=torch.tensor(methods),
        seeds=torch.arange(num_rows) + first_seed,
        choices=torch.arange(num_rows) % 2,
        any_coupled=Method.COUPLED in methods,
        any_ratio=Method.RATIO in methods,
    )


def _noise(keys: DrawKeys, row: int, position: int, purpose: Purpose, vocab_size: int) -> Tensor:
    one = slice(row, row + 1)
    return gumbel(keys.seeds[one], keys.choices[one], torch.tensor([position]), purpose, vocab_size)[0]


def _reference(
    logits: Tensor, drafts: Tensor, draft_logits: Tensor, keys: DrawKeys, row: int, position: int, cap: int
) -> tuple[int, int]:
    """(accepted drafts, next token) of one row: the contract, one token after the other."""
    vocab_size = logits.shape[-1]
    method = int(keys.method[row])
    for j in range(min(cap, drafts.shape[1])):
        draft, scores = int(drafts[row, j]), logits[row, j]
        if method == Method.RATIO:
            p, q = scores.softmax(-1), draft_logits[row, j].softmax(-1)
            one = slice(row, row + 1)
            place = torch.tensor([position + j])
            u = float(uniform(keys.seeds[one], keys.choices[one], place, Purpose.ACCEPT, 1))
            if u < float(p[draft]) / float(q[draft]):
                continue
            residual = (p - q).clamp(min=0)
            weights = residual if residual.sum() > 0 else p
            noise = _noise(keys, row, position + j, Purpose.RECOVER, vocab_size)
            return j, int((weights.log() + noise).argmax())
        if method == Method.COUPLED:
            scores = scores + _noise(keys, row, position + j, Purpose.TARGET, vocab_size)
        if int(scores.argmax()) != draft:
            return j, int(scores.argmax())
    end = max(0, min(cap, drafts.shape[1]))
    scores = logits[row, end]
    if method != Method.GREEDY:
        scores = scores + _noise(keys, row, position + end, Purpose.TARGET, vocab_size)
    return end, int(scores.argmax())


def _close_logits(seed: int, num_rows: int, k: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Target and draft logits that resemble each other, with some tokens removed."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, k + 1, vocab_size, generator=generator) * 2
    draft_logits = logits[:, :k] + torch.randn(num_rows, k, vocab_size, generator=generator) * 0.3
    removed = torch.rand(num_rows, k + 1, vocab_size, generator=generator) < 0.2
    removed[..., 0] = False
    return logits.masked_fill(removed, -INF), draft_logits.masked_fill(removed[:, :k].roll(1, 0), -INF)


def _drafts(draft_logits: Tensor, keys: DrawKeys, positions: Tensor) -> Tensor:
    num_rows, k, _ = draft_logits.shape
    columns = [draw(draft_logits[:, i], keys, positions + i, draft=True) for i in range(k)]
    return torch.stack(columns, dim=1) if columns else torch.empty(num_rows, 0, dtype=torch.int64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    methods=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6),
    k=st.integers(0, 4),
    seed=st.integers(0, 10_000),
)
def test_a_mixed_batch_equals_the_loop(methods: list[int], k: int, seed: int) -> None:
    keys = _keys(methods, seed)
    logits, draft_logits = _close_logits(seed, len(methods), k, 11)
    positions = torch.arange(len(methods)) * 3 + 7
    drafts = _drafts(draft_logits, keys, positions)
    caps = (torch.arange(len(methods)) + seed) % (k + 2) - (seed % 2)
    result = accept(logits, drafts, draft_logits, keys, positions, caps)
    for row in range(len(methods)):
        wanted = _reference(logits, drafts, draft_logits, keys, row, int(positions[row]), int(caps[row]))
        assert (int(result.num_accepted[row]), int(result.next_token[row])) == wanted
    assert not result.bad.any()


def _one(logits: list[list[float]], drafts: list[int], cap: int = 99) -> Acceptance:
    return accept(
        torch.tensor([logits]), torch.tensor([drafts]), None, _keys([0]), torch.tensor([5]), torch.tensor([cap])
    )


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    result = _one([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]], [1])
    assert (int(result.num_accepted), int(result.next_token)) == (1, 0)
    result = _one([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]], [2])
    assert (int(result.num_accepted), int(result.next_token)) == (0, 1)
    assert draw(torch.tensor([[1.0, 3.0, 3.0]]), _keys([0]), torch.tensor([1]), draft=True).tolist() == [1]


def test_only_ratio_drafts_have_noise_of_their_own() -> None:
    keys = _keys([0, 1, 2])
    logits, positions = _close_logits(2, 3, 0, 50)[0][:, 0], torch.tensor([4, 5, 6])
    for is_draft in (False, True):
        drawn = draw(logits, keys, positions, draft=is_draft).tolist()
        purpose = Purpose.DRAFT if is_draft else Purpose.TARGET
        wanted = [
            logits[0],
            logits[1] + _noise(keys, 1, 5, Purpose.TARGET, 50),
            logits[2] + _noise(keys, 2, 6, purpose, 50),
        ]
        assert drawn == [int(scores.argmax()) for scores in wanted]
    assert not torch.equal(_noise(keys, 2, 6, Purpose.DRAFT, 50), _noise(keys, 2, 6, Purpose.TARGET, 50))


def test_a_match_after_a_mismatch_does_not_count() -> None:
    result = _one([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], [0, 1])
    assert (int(result.num_accepted), int(result.next_token)) == (0, 1)


@pytest.mark.parametrize(("cap", "accepted"), [(-3, 0), (0, 0), (1, 1), (2, 2), (7, 2)])
def test_the_cap_ends_a_row_of_right_drafts(cap: int, accepted: int) -> None:
    result = _one([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], [1, 2], cap)
    assert (int(result.num_accepted), int(result.next_token)) == (accepted, [1, 2, 0][accepted])


def test_a_capped_ratio_row_draws_from_p_with_the_target_noise() -> None:
    keys = _keys([2] * 200)
    logits, draft_logits = _close_logits(1, 200, 1, 9)
    positions = torch.arange(200)
    drafts = _drafts(draft_logits, keys, positions)
    result = accept(logits, drafts, draft_logits, keys, positions, torch.zeros(200, dtype=torch.int64))
    plain = draw(logits[:, 0], keys, positions, draft=False)
    assert torch.equal(result.next_token, plain)
    assert not torch.equal(result.next_token, drafts[:, 0])


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_broken_row_is_told_and_changes_no_other(method: Method, poison: float) -> None:
    methods = [int(method), 0, 1, 2, int(method)]
    keys = _keys(methods)
    logits, draft_logits = _close_logits(3, 5, 3, 9)
    positions = torch.arange(5) + 2
    drafts = _drafts(draft_logits, keys, positions)
    caps = torch.full((5,), 3)
    clean = accept(logits, drafts, draft_logits, keys, positions, caps)
    broken = logits.clone()
    if poison == -INF:
        broken[0, 0] = -INF
    else:
        broken[0, 0, 4] = poison
    result = accept(broken, drafts, draft_logits, keys, positions, caps)
    assert result.bad.tolist() == [True, False, False, False, False]
    assert torch.equal(result.num_accepted[1:], clean.num_accepted[1:])
    assert torch.equal(result.next_token[1:], clean.next_token[1:])
    assert (result.next_token >= 0).all()
    assert (result.next_token < 9).all()


def test_faults_beyond_the_last_position_that_counts_are_ignored() -> None:
    nothing = [NAN, NAN]
    assert not _one([[0.0, 1.0], nothing], [0]).bad  # the draft is rejected: position 1 is of another text
    assert _one([[0.0, 1.0], nothing], [1]).bad
    assert not _one([[0.0, 1.0], nothing], [1], cap=0).bad


def test_a_draft_that_is_no_token() -> None:
    row = [0.0, 1.0]
    assert _one([row, row], [2]).bad
    assert _one([row, row], [-1]).bad
    assert not _one([row, row], [-1], cap=0).bad
    assert not _one([row, row, row], [0, -1]).bad
    assert int(_one([row, row], [2]).num_accepted) == 0


def test_broken_draft_logits_fail_ratio_rows_only() -> None:
    for method, bad in ((Method.COUPLED, False), (Method.RATIO, True)):
        keys = _keys([int(method), 2])
        logits, draft_logits = _close_logits(5, 2, 1, 9)
        draft_logits[0, 0, 3] = NAN
        positions = torch.tensor([4, 4])
        drafts = torch.zeros(2, 1, dtype=torch.int64)
        result = accept(logits, drafts, draft_logits, keys, positions, torch.ones(2, dtype=torch.int64))
        assert result.bad.tolist() == [bad, False]


def test_equal_distributions_accept_every_draft() -> None:
    keys = _keys([2] * 500)
    logits, _ = _close_logits(6, 500, 2, 9)
    positions = torch.arange(500)
    drafts = _drafts(logits[:, :2], keys, positions)
    result = accept(logits, drafts, logits[:, :2], keys, positions, torch.full((500,), 2))
    assert (result.num_accepted == 2).all()


def test_a_recovered_token_is_one_the_draft_underrates() -> None:
    keys = _keys([2] * 2000)
    p, q = torch.tensor([0.1, 0.5, 0.4, 0.0]), torch.tensor([0.6, 0.1, 0.1, 0.2])
    logits = p.log().expand(2000, 2, 4)
    draft_logits = q.log().expand(2000, 1, 4)
    positions = torch.arange(2000)
    drafts = _drafts(draft_logits, keys, positions)
    result = accept(logits, drafts, draft_logits, keys, positions, torch.ones(2000, dtype=torch.int64))
    rejected = result.num_accepted == 0
    assert set(result.next_token[rejected].tolist()) == {1, 2}
    assert float(rejected.float().mean()) == pytest.approx(0.7, abs=0.05)  # 1 - sum of min(p, q)


def test_a_draft_outside_both_distributions_recovers_from_p() -> None:
    keys = _keys([2])
    p = torch.tensor([[0.3, 0.7, 0.0]]).log()
    result = accept(p.expand(1, 2, 3), torch.tensor([[2]]), p.unsqueeze(1), keys, torch.tensor([3]), torch.tensor([1]))
    assert int(result.num_accepted) == 0
    wanted = p[0] + _noise(keys, 0, 3, Purpose.RECOVER, 3)
    assert int(result.next_token) == int(wanted.argmax())
