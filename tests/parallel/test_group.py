"""Each collective against its definition, for threads and for processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from parallel.group import Group, SoloGroup
from parallel.layout import Layout, RankGroups, build_groups
from parallel.ledger import Ledger, LedgerGroup
from tests.thread_group import run_ranks

Outputs = dict[str, torch.Tensor]


def rank_input(rank: int, rows: int) -> torch.Tensor:
    return torch.arange(rows * 3, dtype=torch.float32).view(rows, 3) + 100 * rank


def exercise(group: Group) -> Outputs:
    """Every operation once, with rows and without; several under way at once."""
    size, rank = group.size, group.rank
    counts = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]  # rank i sends counts[i][j] rows to j
    send, receive = counts[rank], [counts[i][rank] for i in range(size)]
    pending = {
        "gather": group.all_gather(rank_input(rank, 2)),
        "scatter": group.reduce_scatter(rank_input(rank, 2 * size)),
        "exchange": group.all_to_all(rank_input(rank, 2 * size)),
        "uneven": group.all_to_all_uneven(rank_input(rank, sum(send)), send, receive),
        "empty gather": group.all_gather(torch.empty(0, 3)),
        "empty scatter": group.reduce_scatter(torch.empty(0, 3)),
        "empty uneven": group.all_to_all_uneven(torch.empty(0, 3), [0] * size, [0] * size),
    }
    found = {name: operation.wait().clone() for name, operation in pending.items()}
    sized = {
        "sized": group.all_to_all_sized(rank_input(rank, sum(send)), send, 2),
        "roomy sized": group.all_to_all_sized(rank_input(rank, sum(send)).to(torch.float64), send, 7),
        "empty sized": group.all_to_all_sized(torch.empty(0, 3), [0] * size, 0),
    }
    for name, exchange in reversed(sized.items()):
        rows, counts_here = exchange.wait()
        assert exchange.wait()[1] == counts_here
        found[name], found[f"{name} counts"] = rows.clone(), torch.tensor(counts_here)
    return found


def check(outputs: list[Outputs]) -> None:
    size = len(outputs)
    counts = [[(i + 2 * j) % 3 for j in range(size)] for i in range(size)]
    inputs = [rank_input(r, 2 * size) for r in range(size)]
    for rank, found in enumerate(outputs):
        assert torch.equal(found["gather"], torch.cat([rank_input(r, 2) for r in range(size)]))
        assert torch.equal(found["scatter"], sum(inputs)[2 * rank : 2 * rank + 2])  # type: ignore[index]
        assert torch.equal(found["exchange"], torch.cat([x[2 * rank : 2 * rank + 2] for x in inputs]))
        parts = [torch.split(rank_input(r, sum(counts[r])), counts[r])[rank] for r in range(size)]
        assert torch.equal(found["uneven"], torch.cat(parts))
        for name in ("sized", "roomy sized"):
            assert torch.equal(found[name], torch.cat(parts).to(found[name].dtype))
            assert found[f"{name} counts"].tolist() == [len(part) for part in parts]
        assert found["roomy sized"].dtype == torch.float64
        assert found["empty sized counts"].tolist() == [0] * size
        for name in ("empty gather", "empty scatter", "empty uneven", "empty sized"):
            assert found[name].shape == (0, 3)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=3), Layout(dp=2, tp=2)])
def test_threads(layout: Layout) -> None:
    results = run_ranks(layout, lambda rank, groups: (exercise(groups.tp), exercise(groups.ep)))
    check([ep for _, ep in results])
    for d in range(layout.dp):
        check([results[d * layout.tp + t][0] for t in range(layout.tp)])


def test_a_rank_that_calls_something_else_is_found() -> None:
    def work(rank: int, groups: RankGroups) -> None:
        x = torch.zeros(2, 1)
        (groups.ep.all_gather(x) if rank else groups.ep.all_to_all(x)).wait()

    with pytest.raises(RuntimeError, match="ranks disagree"):
        run_ranks(Layout(dp=2), work)


def test_alone_every_operation_is_the_identity() -> None:
    check([exercise(SoloGroup("tp"))])


def process_main(rank: int, layout: Layout, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=layout.ep)
    groups = build_groups(layout, "cpu")
    save_file(exercise(groups.tp), f"{folder}/tp{rank}")
    save_file(exercise(groups.ep), f"{folder}/ep{rank}")
    dist.barrier()
    dist.destroy_process_group()


def test_processes(tmp_path: Path) -> None:
    layout = Layout(dp=2, tp=2)
    mp.spawn(process_main, (layout, str(tmp_path)), nprocs=layout.ep)  # type: ignore[no-untyped-call,attr-defined]
    check([load_file(tmp_path / f"ep{rank}") for rank in range(4)])
    check([load_file(tmp_path / f"tp{rank}") for rank in (0, 1)])
    check([load_file(tmp_path / f"tp{rank}") for rank in (2, 3)])


def test_ledger_notes_operation_and_shape() -> None:
    ledger = Ledger(step=7, half=1)
    exercise(LedgerGroup(SoloGroup("ep"), ledger))
    assert ledger.entries[:2] == [(7, 1, "ep", "all_gather", (2, 3)), (7, 1, "ep", "reduce_scatter", (2, 3))]
    assert ledger.entries[3] == (7, 1, "ep", "all_to_all_uneven", (3,))
