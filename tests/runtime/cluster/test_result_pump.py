"""The thread that reads a rank's results: whatever keeps it from that is told, else everybody would wait for them."""

from __future__ import annotations

import errno
import os
import queue

import pytest

from runtime.cluster.result_pump import ResultPump
from runtime.liveness import ProcessId
from runtime.ring import RingDamaged, RingError, RingReader, RingWriter, create_segment
from tests.runtime.cluster.line_pair import SOON_S


def _fails(*_: object, **__: object) -> bool:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(("owner", "name"), [(RingReader, "__init__"), (ProcessId, "is_alive")])
def test_a_ring_that_the_system_keeps_it_from_is_told_of(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    told: queue.SimpleQueue[tuple[int, RingError]] = queue.SimpleQueue()
    fd = create_segment("results", 1 << 12)
    writer = RingWriter(fd, "results", ["relay"])
    monkeypatch.setattr(owner, name, _fails)
    pump = ResultPump(5, fd, lambda rank, data: True, lambda rank, error: told.put((rank, error)))
    os.close(fd)
    rank, error = told.get(timeout=SOON_S)
    assert rank == 5
    assert isinstance(error, RingDamaged)
    assert "Too many open files" in str(error)
    pump.stop()
    pump.join()
    writer.close()
