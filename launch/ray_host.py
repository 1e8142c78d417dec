"""What Ray's actors are: hosts of one process of ours, which they start, listen to and end, and nothing else."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
END_S = 10.0  # between asking a process to end and ending it


class ProcessHost:
    """Parent of a controller or a worker. Everything that crosses Ray is a text, a number or a list of such."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._chunks: list[tuple[str, bytes]] = []
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def where(self) -> tuple[str, str, list[str]]:
        """(Ray's id of this node, its address, the devices that Ray gave this actor)."""
        import ray
        from ray.util import get_node_ip_address

        context = ray.get_runtime_context()
        devices = context.get_accelerator_ids().get("GPU", [])
        return str(context.get_node_id()), str(get_node_ip_address()), [str(device) for device in devices]

    def address_file(self) -> str:
        """Where the process on this node may write its address."""
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-")
        return str(Path(self._folder.name) / "address")

    def read(self, file: str) -> str:
        """What stands in a file of this node, "" while there is none."""
        path = Path(file)
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start the process; its pid. `environment` goes on top of the actor's; what it prints is for `output`."""
        assert self._process is None, "a host has one process"
        self._process = subprocess.Popen(
            list(command), env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, preexec_fn=_die_with_parent,
        )
        for name, stream in (("out", self._process.stdout), ("err", self._process.stderr)):
            if stream is not None:
                reader = threading.Thread(target=self._read, args=(name, stream), daemon=True)
                reader.start()
                self._readers.append(reader)
        return self._process.pid

    def output(self) -> tuple[list[tuple[str, bytes]], int | None]:
        """("out" or "err", bytes) since the last call, and the exit code once all output is here and it has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(END_S)
        with self._lock:
            chunks, self._chunks = self._chunks, []
        return chunks, code

    def send_signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self) -> int | None:
        """End the process, by force if it takes too long; its exit code, None if there was none."""
        if self._process is None:
            return None
        self.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _read(self, name: str, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 1 << 16):
            with self._lock:
                self._chunks.append((name, data))
        stream.close()


def _die_with_parent() -> None:
    """An actor that is killed takes its process with it: SIGTERM, so that a controller can tell its workers."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
