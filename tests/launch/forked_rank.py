"""Rank processes forked from this interpreter, which has its libraries: they start in a tenth of the time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

from launch.rank_main import RankSpec, main
from tests.launch.faulty_rank import build_faulty_rank


class ForkedRank:
    """What launch/deployment.py and RankWatch need of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout if timeout is not None else 1e9)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.005)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


def fork_rank(_module: str, spec: RankSpec, _threads: int) -> ForkedRank:
    """Stands in for `_start_rank` of launch/deployment.py: the child has its descriptors and nothing else of ours."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(read_fd, 0)
            sys.stdin = os.fdopen(0)  # pytest has put something else there
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            kept = {0, 1, 2, spec.vitals_fd, spec.plans_fd, spec.results_fd, spec.tp_fd, spec.ep_fd}
            for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
                if fd not in kept:
                    with suppress(OSError):  # the listing's own descriptor is gone already
                        os.close(fd)
            main(build_faulty_rank)
        finally:
            os._exit(70)  # main never returns; nothing of the tests may run twice
    os.close(read_fd)
    os.write(write_fd, spec.to_json())  # far below what a pipe holds
    os.close(write_fd)
    return ForkedRank(pid)
