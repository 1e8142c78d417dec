"""Processes at the two ends of a ring, for tests: `python -m tests.runtime.ring_process ROLE JSON`, told apart by role.

Each prints "ready" once its imports are done, starts at a line on its standard input, and ends with one JSON report.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from runtime.ring import RingError, RingReader, RingWriter

ROOT = Path(__file__).resolve().parents[2]
STAMP_BYTES = 8
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Report:
    """How an end fared. `worst_s` is the longest it waited for a message that was there, for room, or for a fault."""

    messages: int
    fault: str
    text: str
    worst_s: float


@dataclass(frozen=True)
class Storm:
    """What happens to one ring, all of it drawn from the seed."""

    seed: int
    capacity: int  # bytes
    sizes: tuple[int, ...]  # bytes of each message, after an 8-byte time stamp
    late_s: tuple[float, ...]  # per reader: how long it stays away
    naps: tuple[float, ...]  # per reader: share of messages after which it naps for up to 10 ms
    death: str  # "", "reader", or how the writer dies: "unpublished", "half" or "any"
    victim: int  # reader that dies
    at: int  # number of the message at which somebody dies

    @classmethod
    def of(cls, seed: int, num_messages: int = 100, total_bytes: int = 4_000_000) -> Storm:
        rng = random.Random(seed)
        capacity = STAMP_BYTES + rng.choice([1 << 12, 1 << 16, 1 << 20, 1 << 22]) + rng.randrange(64)
        longest = capacity - STAMP_BYTES
        sizes = [min(longest, int(longest ** rng.random()) - 1) for _ in range(num_messages)]
        sizes[rng.randrange(num_messages)] = longest
        while sum(sizes) > total_bytes:
            sizes[sizes.index(max(sizes))] //= 2
        readers = rng.randint(1, 3)
        return cls(
            seed=seed, capacity=capacity, sizes=tuple(sizes),
            late_s=tuple(rng.choice([0.0, 0.0, rng.uniform(0.0, 0.3)]) for _ in range(readers)),
            naps=tuple(rng.choice([0.0, rng.uniform(0.0, 0.3)]) for _ in range(readers)),
            death=["", "reader", "unpublished", "half", "any"][seed % 5],
            victim=rng.randrange(readers), at=rng.randint(1, num_messages - 20),
        )  # fmt: skip

    def payload(self, number: int) -> bytes:
        """Message `number` without its stamp."""
        return np.random.default_rng([self.seed, number]).bytes(self.sizes[number % len(self.sizes)])


class DyingWriter(RingWriter):
    """Kills itself in the middle of writing one message."""

    death, at = "", -1

    def _write(self, data: bytes | bytearray | memoryview, length: int, sequence: int) -> None:
        super()._write(data, length, sequence)
        if self.death == "half" and sequence == self.at + 1:
            start = (self._position + 32) % self._data_bytes
            half = min(length, self._data_bytes - start) // 2
            self._segment.memory[-self._data_bytes + start : -self._data_bytes + start + half] = bytes(half)
            os.kill(os.getpid(), signal.SIGKILL)

    def _publish(self) -> None:
        if self.death == "unpublished" and self.sequence == self.at + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._publish()


def write(fd: int, storm: Storm) -> Report:
    """Send the storm's messages; for ever where the writer is to be killed at any time."""
    sent, worst, error = 0, 0.0, RingError()
    with DyingWriter(fd, "storm", [f"rank {index}" for index in range(len(storm.late_s))]) as writer:
        writer.death, writer.at = storm.death, storm.at
        start_together()
        start = time.monotonic()
        try:
            while sent < len(storm.sizes) or storm.death == "any":
                payload, start = storm.payload(sent), time.monotonic()
                writer.send(time.monotonic_ns().to_bytes(STAMP_BYTES, "little") + payload, TIMEOUT_S)
                sent, worst = sent + 1, max(worst, time.monotonic() - start)
            start = time.monotonic()
            writer.drain(TIMEOUT_S)
        except RingError as raised:
            error = raised
        return Report(sent, type(error).__name__, str(error), max(worst, time.monotonic() - start))


def read(fd: int, storm: Storm, index: int) -> Report:
    """Receive until something ends it, and compare every byte with what was meant to come."""
    rng, received, worst = random.Random(f"{storm.seed} {index}"), 0, 0.0
    start_together()
    time.sleep(storm.late_s[index])
    with RingReader(fd, index) as reader:
        while True:
            start = time.monotonic()
            try:
                message = reader.receive(TIMEOUT_S)
            except RingError as error:
                return Report(received, type(error).__name__, str(error), max(worst, time.monotonic() - start))
            sent = int.from_bytes(message[:STAMP_BYTES], "little") * 1e-9
            worst = max(worst, time.monotonic() - max(sent, start))
            assert message[STAMP_BYTES:] == storm.payload(received), f"message {received} is torn"
            received += 1
            if storm.death == "reader" and index == storm.victim and received == storm.at:
                os.kill(os.getpid(), signal.SIGKILL)
            if rng.random() < storm.naps[index]:
                time.sleep(rng.uniform(0.0, 0.01))


def start_together() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


@contextmanager
def spawned(fd: int, *roles: Mapping[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
    """One process a role, ready and waiting for `go`; none of them outlives the block."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        processes = []
        for role in roles:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.runtime.ring_process", json.dumps({"fd": fd, **role})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd], env=env,
            )  # fmt: skip
            stack.callback(_end, process)
            processes.append(process)
            if role["role"] == "write":  # readers attach to a ring that is there
                expect_ready(process)
        for process, role in zip(processes, roles, strict=True):
            if role["role"] != "write":
                expect_ready(process)
        yield processes


def expect_ready(process: subprocess.Popen[str]) -> None:
    assert pipe(process.stdout).readline() == "ready\n"


def go(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        pipe(process.stdin).write("go\n")
        pipe(process.stdin).flush()


def report(process: subprocess.Popen[str]) -> Report | None:
    """What a process reported when it ended; None if it was killed."""
    text = pipe(process.stdout).read()
    return Report(**json.loads(text)) if text else None


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        pipe(stream).close()


def main(arguments: Mapping[str, Any]) -> None:
    storm = Storm(**arguments["storm"])
    end = write(arguments["fd"], storm) if arguments["role"] == "write" else None
    end = end or read(arguments["fd"], storm, arguments["index"])
    sys.stdout.write(json.dumps(asdict(end)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
