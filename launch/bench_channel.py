"""`lockstep bench channel`: how long a message takes from the controller to the last of its ranks, on the real ring."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runtime.ring import RingClosed, RingReader, RingWriter, WriterDead, create_segment

WARM_UP = 100
MESSAGES_IN_RING = 4
START_TIMEOUT_S, MESSAGE_TIMEOUT_S = 30.0, 10.0
READER = "import sys; from launch.bench_channel import read; read(int(sys.argv[1]), int(sys.argv[2]))"


def measure(*, num_readers: int, num_bytes: int, num_messages: int, interval_us: int) -> dict[str, Any]:
    """Microseconds from before `send` until the writer sees that every reader process has copied and verified.

    With an interval the writer rests between messages, and readers have gone to sleep when one comes.
    """
    for name, value, least in (
        ("readers", num_readers, 1), ("bytes", num_bytes, 0),
        ("messages", num_messages, 1), ("interval-us", interval_us, 0),
    ):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} = {value}: expected an integer >= {least}")
    message = np.random.default_rng(0).bytes(num_bytes)
    sent_us, arrived_us = [], []
    with _readers(num_readers, num_bytes) as writer:
        for number in range(-WARM_UP, num_messages):
            start = time.perf_counter()
            writer.send(message, MESSAGE_TIMEOUT_S)
            sent = time.perf_counter()
            writer.drain(MESSAGE_TIMEOUT_S)
            arrived = time.perf_counter()
            if number >= 0:
                sent_us.append((sent - start) * 1e6)
                arrived_us.append((arrived - start) * 1e6)
            if interval_us:
                time.sleep(interval_us * 1e-6)
    return {
        "readers": num_readers,
        "bytes": num_bytes,
        "messages": num_messages,
        "interval_us": interval_us,
        **{f"p{q}_us": round(float(np.percentile(arrived_us, q)), 1) for q in (10, 50, 90, 99)},
        "max_us": round(max(arrived_us), 1),
        "send_p50_us": round(float(np.median(sent_us)), 1),
    }


def read(fd: int, index: int) -> None:
    """The life of a reader process: take everything until the writer leaves, in whatever way."""
    with RingReader(fd, index) as reader:
        os.close(fd)
        try:
            while True:
                reader.receive(None)
        except (RingClosed, WriterDead):
            pass


@contextmanager
def _readers(num_readers: int, num_bytes: int) -> Iterator[RingWriter]:
    """A ring whose readers are processes that import nothing heavy, all attached."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent.parent), *_python_path()])}
    with ExitStack() as stack:
        fd = create_segment("bench", MESSAGES_IN_RING * (num_bytes + 64))
        stack.callback(os.close, fd)
        writer = RingWriter(fd, "bench", [f"reader process {index}" for index in range(num_readers)])
        for index in range(num_readers):
            command = [sys.executable, "-c", READER, str(fd), str(index)]
            process = subprocess.Popen(command, pass_fds=[fd], env=env, stdin=subprocess.DEVNULL)
            stack.callback(_end, process)
        stack.callback(writer.close)  # runs first: the readers leave by themselves
        writer.wait_attached(START_TIMEOUT_S)
        yield writer


def _python_path() -> list[str]:
    return [path for path in [os.environ.get("PYTHONPATH")] if path]


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=MESSAGE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
