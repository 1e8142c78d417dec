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
from parallel.socket_group import ExchangeListener, build_host_groups, close_groups
from runtime.futex import best_sleeper
from tests.parallel.hosts import SECRET, TIMEOUT_S
from tests.parallel.test_group import check, exercise

ROOT = Path(__file__).resolve().parent.parent.parent
LAYOUT = Layout(dp=3)
VICTIM = 1


def process_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    listener, abort, place = ExchangeListener("127.0.0.1"), AbortSignal(), Path(folder)
    put(place / f"port{rank}", str(listener.port))
    ports = [int(get(place / f"port{peer}")) for peer in range(LAYOUT.ep)]
    groups = build_host_groups(
        LAYOUT, rank, epoch=1, addresses=[("127.0.0.1", port) for port in ports], node_of_rank=range(LAYOUT.ep),
        segments={}, slot_bytes=0, listener=listener, secret=SECRET, sleeper=best_sleeper(), abort=abort,
    )
    save_file(exercise(groups.ep), place / f"{rank}.safetensors")
    groups.ep.all_gather(torch.zeros(1)).wait()
    if rank == VICTIM:
        put(place / "ready", "")
        time.sleep(TIMEOUT_S)  # it is killed in here, while the others wait for it
    with pytest.raises(PeerLost) as error:
        groups.ep.all_gather(torch.zeros(1)).wait()
    put(place / f"error{rank}", str(error.value))
    get(place / f"error{2 - rank}")  # the other one is to be told of the victim, not of this rank
    close_groups(groups)


def put(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


def get(path: Path) -> str:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.005)
    return path.read_text()


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
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert get(tmp_path / f"error{rank}").startswith(f"ep: rank {VICTIM} is lost: ")
    check([load_file(tmp_path / f"{rank}.safetensors") for rank in range(LAYOUT.ep)])
