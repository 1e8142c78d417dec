"""torch.distributed joined, left and joined again: a wait is called off, and the next epoch's results are right."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from parallel.abort import Aborted, AbortSignal
from parallel.group import ProcessGroup
from parallel.groups import host_store, join_ranks, leave_ranks, listen_locally
from parallel.layout import Layout, build_groups
from tests.parallel.test_group import check, exercise

LAYOUT = Layout(dp=2)


def process_main(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    abort = AbortSignal()
    for epoch in range(2):
        join_ranks(rank, LAYOUT.ep, port=port, device_type="cpu", epoch=epoch)
        groups = build_groups(LAYOUT, "cpu", abort)
        if rank == 1:
            time.sleep(0.3)  # longer than waits last at a time
        save_file(exercise(groups.ep), f"{folder}/{epoch}-{rank}")
        if rank == 0:  # the other does not make this call
            timer = threading.Timer(0.2, abort.set)
            timer.start()
            begin = time.monotonic()
            with pytest.raises(Aborted):
                groups.ep.all_gather(torch.zeros(1)).wait()
            assert time.monotonic() - begin > 0.15
            abort.clear()
        else:
            time.sleep(0.5)
        assert isinstance(groups.ep, ProcessGroup)
        leave_ranks(groups)
    abort.close()


def test_two_epochs(tmp_path: Path) -> None:
    listener = listen_locally()
    port = listener.getsockname()[1]
    store = host_store(listener)
    mp.spawn(process_main, (port, str(tmp_path)), nprocs=LAYOUT.ep)  # type: ignore[no-untyped-call,attr-defined]
    del store
    for epoch in range(2):
        check([load_file(tmp_path / f"{epoch}-{rank}") for rank in range(LAYOUT.ep)])
