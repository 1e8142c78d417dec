"""torch.distributed over epochs: a wait is called off, the ranks meet again, and the results are right."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from parallel.abort import Aborted, AbortSignal
from parallel.layout import Layout
from parallel.socket_group import ExchangeListener
from parallel.torch_ranks import join_over
from tests.parallel.hosts import meet_as_process
from tests.parallel.test_group import check, exercise

LAYOUT = Layout(dp=2)


def process_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    abort, listener = AbortSignal(), ExchangeListener("127.0.0.1")
    for epoch in (1, 2):
        met = meet_as_process(LAYOUT, rank, Path(folder), listener, abort, epoch)
        ranks = join_over(
            met, LAYOUT, rank, host=listener.host, epoch=epoch, device_type="cpu", abort=abort
        )
        group = ranks.groups.ep
        if rank == 1:
            time.sleep(0.3)  # longer than waits last at a time
        save_file(exercise(group), f"{folder}/{epoch}-{rank}")
        if rank == 0:  # the other does not make this call
            timer = threading.Timer(0.2, abort.set)
            timer.start()
            begin = time.monotonic()
            with pytest.raises(Aborted):
                group.all_gather(torch.zeros(1)).wait()
            assert time.monotonic() - begin > 0.15
            abort.clear()
        else:
            time.sleep(0.5)
        ranks.leave()
    abort.close()
    listener.close()


def test_two_epochs(tmp_path: Path) -> None:
    mp.spawn(process_main, (str(tmp_path),), nprocs=LAYOUT.ep)  # type: ignore[no-untyped-call,attr-defined]
    for epoch in (1, 2):
        check([load_file(tmp_path / f"{epoch}-{rank}") for rank in range(LAYOUT.ep)])
