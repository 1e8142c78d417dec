"""The noise is Philox, uniform, and a function of its key alone."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

import mtp.noise
from mtp.noise import Purpose, gumbel, philox, uniform

ONES = 0xFFFFFFFF


def _keys(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    idx = torch.arange(num_rows)
    return idx * 7_919_000_003 - 4, idx % 3, idx * 11 + 5


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    words = philox((c0, c1, c2, c3), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in words) == expected


def test_a_row_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, choices, positions = _keys(9)
    purposes = torch.arange(9) % 4
    whole = gumbel(seeds, choices, positions, purposes, 37)
    numbers = uniform(seeds, choices, positions, purposes, 3)
    order = torch.tensor([4, 0, 8, 2])
    part = gumbel(seeds[order], choices[order], positions[order], purposes[order], 37)
    assert torch.equal(part, whole[order])
    assert torch.equal(uniform(seeds[order], choices[order], positions[order], purposes[order], 3), numbers[order])
    monkeypatch.setattr(mtp.noise, "_CPU_CHUNK", 25)
    assert torch.equal(gumbel(seeds, choices, positions, purposes, 37), whole)
    for row in range(9):
        one = slice(row, row + 1)
        alone = gumbel(seeds[one], choices[one], positions[one], Purpose(row % 4), 37)
        assert torch.equal(alone, whole[one])


@pytest.mark.parametrize(("first", "size"), [(0, 16), (16, 16), (5, 7), (30, 1), (3, 34)])
def test_a_shard_draws_its_share(first: int, size: int) -> None:
    keys = _keys(4)
    whole = gumbel(*keys, Purpose.TARGET, 37)
    assert torch.equal(gumbel(*keys, Purpose.TARGET, size, first_token=first), whole[:, first : first + size])


def test_more_numbers_begin_with_the_same_ones() -> None:
    keys = _keys(3)
    assert torch.equal(uniform(*keys, Purpose.ACCEPT, 5)[:, :2], uniform(*keys, Purpose.ACCEPT, 2))


def test_every_part_of_the_key_counts() -> None:
    seeds = torch.tensor([1, 1 + 2**32, 1 - 2**63, 2, 1, 1, 1, 1])
    choices = torch.tensor([0, 0, 0, 0, 1, 65535, 0, 0])
    positions = torch.tensor([3, 3, 3, 3, 3, 3, 4, 2**31])
    rows = torch.cat([gumbel(seeds, choices, positions, purpose, 8) for purpose in Purpose])  # [32, 8]
    assert len({tuple(row) for row in rows.tolist()}) == 32
    assert len(set(rows.flatten().tolist())) == rows.numel()


@pytest.mark.parametrize("vary", ["seed", "position", "number"])
def test_uniform_is_uniform(vary: str) -> None:
    num = 200_000
    idx = torch.arange(num)
    same = torch.zeros(num, dtype=torch.int64)
    if vary == "number":
        numbers = uniform(same[:1], same[:1], same[:1], Purpose.ACCEPT, num)[0]
    elif vary == "seed":
        numbers = uniform(idx, same, same, Purpose.ACCEPT, 1)[:, 0]
    else:
        numbers = uniform(same, same, idx, Purpose.ACCEPT, 1)[:, 0]
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-4
    cells = (numbers[:-1] * 16).long() * 16 + (numbers[1:] * 16).long()  # neighbours are independent
    assert stats.chisquare(torch.bincount(cells, minlength=256).numpy()).pvalue > 1e-4
    biased = numbers**1.02
    assert stats.kstest(biased.numpy(), "uniform").pvalue < 1e-4


def test_gumbel_follows_its_law() -> None:
    seeds, zeros = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
    noise = gumbel(seeds, zeros, zeros, Purpose.TARGET, 10)
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-4
    assert stats.kstest((noise * 1.02).flatten().numpy(), "gumbel_r").pvalue < 1e-4
    correlation = torch.corrcoef(noise.T) - torch.eye(10)
    assert correlation.abs().max() < 5 / 20_000**0.5


def test_the_largest_of_logits_and_noise_is_a_draw_from_the_softmax() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.0499, 0.0001])
    seeds, zeros = torch.arange(400_000), torch.zeros(400_000, dtype=torch.int64)
    tokens = (gumbel(seeds, zeros, zeros + 9, Purpose.TARGET, 5) + p.log()).argmax(-1)
    counts = torch.bincount(tokens, minlength=5)
    assert stats.chisquare(counts.numpy(), (p.double() / p.double().sum() * 400_000).numpy()).pvalue > 1e-4


def test_gumbel_stays_finite_at_both_ends() -> None:
    words = [torch.tensor([[word]]) for word in (0, 1, 2**31 - 1, ONES)]
    out = torch.empty(1, 4)
    mtp.noise._gumbel_into(out, words)
    largest, second, least, wrapped = out[0].tolist()
    assert largest == pytest.approx(22.18, abs=0.01)  # log(2^32)
    assert largest > second > 20
    assert least == wrapped == pytest.approx(-2.81, abs=0.01)
