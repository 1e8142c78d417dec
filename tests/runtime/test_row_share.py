"""Rows dealt over a group: each decided once, and nothing lost on the way there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parallel.group import SoloGroup
from parallel.layout import Layout, RankGroups
from runtime.row_share import RowShare
from tests.thread_group import run_ranks


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_row_is_decided_once_with_all_its_logits(tp: int, num_rows: int) -> None:
    logits = torch.randn(num_rows, 2, 8 * tp, generator=torch.Generator().manual_seed(num_rows))
    slots = torch.arange(1, num_rows + 1)

    def work(rank: int, groups: RankGroups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        share = RowShare(groups.tp, num_rows)
        mine = share.mine(slots)
        assert mine.tolist() == share.mine_on_host(slots.numpy()).tolist()
        whole = share.whole_logits(logits[:, :, rank * 8 : (rank + 1) * 8])
        return mine, whole, share.gather(whole.argmax(-1))

    results = run_ranks(Layout(tp=tp), work)
    dealt = torch.cat([mine for mine, _, _ in results])
    assert dealt[:num_rows].tolist() == slots.tolist()
    assert dealt[num_rows:].tolist() == [0] * (len(dealt) - num_rows)
    assert torch.equal(torch.cat([whole for _, whole, _ in results])[:num_rows], logits)
    for _, _, gathered in results:
        assert torch.equal(gathered, logits.argmax(-1))


def test_alone_nothing_is_copied() -> None:
    share = RowShare(SoloGroup("tp"), 3)
    values, host = torch.arange(3), np.arange(3)
    assert share.mine(values) is values
    assert share.mine_on_host(host) is host
    assert share.gather(values) is values
    assert share.whole_logits(values) is values
