"""Ranks on several hosts as processes: the same results, and what the others see when one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.abort import AbortSignal
from parallel.exchange_errors import PeerLost
from parallel.layout import Layout
from parallel.socket_group import ExchangeListener, close_groups
from tests.parallel.hosts import PROCESS_TIMEOUT_S, get, meet_as_process, put
from tests.parallel.test_group import check, exercise

ROOT = Path(__file__).resolve().parent.parent.parent
LAYOUT = Layout(dp=3)
VICTIM = 1


def process_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    place = Path(folder)
    groups = meet_as_process(LAYOUT, rank, place, ExchangeListener("127.0.0.1"), AbortSignal(), epoch=1)
    save_file(exercise(groups.ep), place / f"{rank}.safetensors")
    groups.ep.all_gather(torch.zeros(1)).wait()
    if rank == VICTIM:
        put(place / "ready", "")
        time.sleep(PROCESS_TIMEOUT_S)  # it is killed in here, while the others wait for it
    with pytest.raises(PeerLost) as error:
        groups.ep.all_gather(torch.zeros(1)).wait()
    put(place / f"error{rank}", str(error.value))
    get(place / f"error{2 - rank}")  # the other one is to be told of the victim, not of this rank
    close_groups(groups)


def test_a_killed_rank_is_named_by_all_others(tmp_path: Path) -> None:
    code = "import sys; from tests.parallel.test_socket_processes import process_main; process_main(*{!r})"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code.format((rank, str(tmp_path)))], cwd=ROOT, env=environment)
        for rank in range(LAYOUT.ep)
    ]
    try:
        get(tmp_path / "ready")
        processes[VICTIM].kill()
        codes = [process.wait(PROCESS_TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert get(tmp_path / f"error{rank}").startswith(f"ep: rank {VICTIM} is lost: ")
    check([load_file(tmp_path / f"{rank}.safetensors") for rank in range(LAYOUT.ep)])
