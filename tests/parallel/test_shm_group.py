"""Collectives through shared memory: the definitions, slots that are used again and again, and every misuse."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.shm_group import NUM_SLOTS, ShmGroup, segment_size
from runtime.futex import best_sleeper
from tests.parallel.test_group import check, exercise

T = TypeVar("T")
SLOT_BYTES = 4096
ROOT = Path(__file__).resolve().parent.parent.parent


class Impatient:
    """Sleeps like any other, but not for ever: where one rank fails a test, the others must not hang."""

    def __init__(self) -> None:
        self._inner, self._deadline = best_sleeper(), time.monotonic() + 30

    def wait(self, address: int, seen: int, timeout_s: float) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError("another rank does not come")
        self._inner.wait(address, seen, timeout_s)

    def wake(self, address: int) -> None:
        self._inner.wake(address)


@contextmanager
def segment(size: int, slot_bytes: int = SLOT_BYTES) -> Iterator[int]:
    fd = os.memfd_create("lockstep-test")
    os.ftruncate(fd, segment_size(size, slot_bytes))
    try:
        yield fd
    finally:
        os.close(fd)


def on_threads(size: int, work: Callable[[ShmGroup], T], slot_bytes: int = SLOT_BYTES) -> list[T]:
    """`work` on a thread for each rank: whoever sleeps in the kernel lets the others run."""
    with segment(size, slot_bytes) as fd, ThreadPoolExecutor(size) as pool:
        groups = [ShmGroup("ep", rank, size, fd, slot_bytes, Impatient()) for rank in range(size)]
        return list(pool.map(work, groups))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_definitions(size: int) -> None:
    check(on_threads(size, exercise))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_types(dtype: torch.dtype) -> None:
    def work(group: ShmGroup) -> torch.Tensor:
        return group.all_gather(torch.tensor([[group.rank, 1]]).to(dtype)).wait()

    for found in on_threads(3, work):
        assert found.tolist() == torch.tensor([[rank, 1] for rank in range(3)]).to(dtype).tolist()
        assert found.dtype == dtype


def test_sums_are_added_in_rank_order() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    expected = torch.zeros(1)
    for value in values:
        expected += torch.tensor([value])

    def work(group: ShmGroup) -> torch.Tensor:
        return group.reduce_scatter(torch.full((4,), values[group.rank])).wait()

    assert [found.tolist() for found in on_threads(4, work)] == [expected.tolist()] * 4


def test_slots_are_used_again_whatever_the_pace() -> None:
    """Thousands of operations of changing kind and size, some under way together, at random paces."""
    size, calls = 3, 600
    script = random.Random(1)
    plan = [(script.choice(("gather", "exchange", "scatter")), script.randint(0, 9)) for _ in range(calls)]
    depths = [script.randint(1, NUM_SLOTS - 2) for _ in range(calls)]

    def value(call: int, rank: int, rows: int) -> torch.Tensor:
        return torch.full((rows, 2), float(1000 * rank + call))

    def expected(call: int, rank: int) -> torch.Tensor:
        kind, rows = plan[call]
        if kind == "scatter":
            return torch.full((rows, 2), float(sum(1000 * r + call for r in range(size))))
        return torch.cat([value(call, r, rows) for r in range(size)])

    def work(group: ShmGroup) -> int:
        pace = random.Random(group.rank)
        begun: list[tuple[int, object]] = []
        for call, (kind, rows) in enumerate(plan):
            if kind == "gather":
                begun.append((call, group.all_gather(value(call, group.rank, rows))))
            elif kind == "exchange":
                begun.append((call, group.all_to_all(value(call, group.rank, rows * size))))
            else:
                begun.append((call, group.reduce_scatter(value(call, group.rank, rows * size))))
            if pace.random() < 0.02:
                time.sleep(0.003)
            # in any order, as long as none is left behind by more than there are slots
            while begun and (len(begun) >= depths[call] or begun[0][0] <= call - NUM_SLOTS + 2):
                late = begun[0][0] <= call - NUM_SLOTS + 2
                earlier, pending = begun.pop(0 if late else pace.randrange(len(begun)))
                assert torch.equal(pending.wait(), expected(earlier, group.rank))  # type: ignore[attr-defined]
        for earlier, pending in begun:
            assert torch.equal(pending.wait(), expected(earlier, group.rank))  # type: ignore[attr-defined]
        return group.rank

    assert on_threads(size, work) == [0, 1, 2]


def test_ranks_that_call_different_operations_are_told() -> None:
    def work(group: ShmGroup) -> str:
        x = torch.zeros(2, 1)
        with pytest.raises(RuntimeError) as error:
            (group.all_to_all(x) if group.rank else group.all_gather(x)).wait()
        return str(error.value)

    assert "rank 1 made all_to_all, rank 0 all_gather" in on_threads(2, work)[0]


def test_ranks_that_give_different_sizes_are_told() -> None:
    def work(group: ShmGroup) -> str:
        with pytest.raises(RuntimeError) as error:
            group.all_gather(torch.zeros(1 + group.rank, 1)).wait()
        return str(error.value)

    assert "rank 1 gave 8 bytes to all_gather, rank 0 4" in on_threads(2, work)[0]


def test_ranks_that_expect_another_number_of_rows_are_told() -> None:
    def work(group: ShmGroup) -> None:
        x = torch.zeros(2, 4)
        if group.rank == 1:
            group.all_to_all_uneven(x, [1, 1], [1, 1]).wait()
            return
        with pytest.raises(RuntimeError, match="all_to_all_uneven on ep: rank 1 gave 1 rows, rank 0 expects 3"):
            group.all_to_all_uneven(x, [1, 1], [1, 3]).wait()  # not three times the same one

    on_threads(2, work)


def test_a_message_without_room_is_refused() -> None:
    def work(group: ShmGroup) -> None:
        with pytest.raises(ValueError, match=r"all_gather on ep: 4100 bytes, room for 4096"):
            group.all_gather(torch.zeros(1025, 1))
        assert len(group.all_gather(torch.zeros(1024, 1)).wait()) == 1024

    on_threads(1, work)


def test_more_operations_than_slots_are_refused() -> None:
    def work(group: ShmGroup) -> None:
        begun = [group.all_gather(torch.zeros(1)) for _ in range(NUM_SLOTS)]
        with pytest.raises(RuntimeError, match=f"{NUM_SLOTS} operations under way"):
            group.all_gather(torch.zeros(1))
        for pending in begun:
            pending.wait()

    on_threads(1, work)


def test_a_rank_that_waits_uses_no_processor() -> None:
    def work(group: ShmGroup) -> float:
        if group.rank == 1:
            time.sleep(1.0)
        begin = time.thread_time()
        group.all_gather(torch.zeros(1)).wait()
        return time.thread_time() - begin

    assert on_threads(2, work)[0] < 0.05


def process_main(rank: int, size: int, fd: int, folder: str) -> None:
    group = ShmGroup("ep", rank, size, fd, SLOT_BYTES, Impatient())
    for _ in range(20):
        outputs = exercise(group)
    save_file(outputs, f"{folder}/{rank}")


def test_processes(tmp_path: Path) -> None:
    size = 3
    with segment(size) as fd:
        code = "import sys; from tests.parallel.test_shm_group import process_main; process_main(*{!r})"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code.format((rank, size, fd, str(tmp_path)))], cwd=ROOT, pass_fds=[fd],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]
        watchdog = threading.Timer(100, lambda: [process.kill() for process in processes])
        watchdog.start()
        codes = [process.wait() for process in processes]
        watchdog.cancel()
    assert codes == [0] * size
    check([load_file(tmp_path / str(rank)) for rank in range(size)])
