"""A rank without a model, for tests of what surrounds it: `python -m tests.launch.fake_rank` imports no torch.

It follows a script in the environment, FAKE_RANK=RANK:WHERE:WHAT, for example 1:step:raise.
"""

from __future__ import annotations

import os
import signal
import struct
import time
import zlib
from collections.abc import Callable, Mapping

from launch.rank_main import RankSpec, main
from runtime.vitals import RankVitals, text_field

SCRIPT = "FAKE_RANK"
NUM_ROWS, WIDTH = 1, 2


class FakeRank:
    """Answers every step with one row: counts 1, ids (step, rank). What its script names happens once it gets there."""

    def __init__(self, spec: RankSpec, vitals: RankVitals) -> None:
        self._spec, self._vitals = spec, vitals
        rank, self._where, self._what = os.environ.get(SCRIPT, "-1::").split(":")
        self._is_scripted = int(rank) == spec.rank
        self._steps = 0
        vitals.phase("loading weights")
        self._act("load")

    @property
    def facts(self) -> Mapping[str, int]:
        return {"num_pages": 100 + self._spec.rank, "capacity": 64, "bytes_read": 7}

    def allocate(self, *, max_model_len: int, num_pages: int) -> None:
        assert (max_model_len, num_pages) == (2048, 100), (max_model_len, num_pages)
        self._act("allocate")

    def run(self, plans: memoryview, publish: Callable[[bytes], None]) -> None:
        self._vitals.phase("target")
        self._steps += 1
        if self._steps == 2:
            self._act("step")
        num_groups = int(self._spec.config["dp"])
        _, _, _, step_id = struct.unpack_from("<4sHHq", plans, 8 * (1 + num_groups))  # see runtime/plan.py
        publish(result_bytes(step_id, self._spec.rank))
        self._vitals.phase("drafter")
        if self._steps == 2:
            self._act("drafter")

    def take_digests(self) -> dict[str, int] | None:
        return None

    def close(self) -> None:
        self._act("close")

    def _act(self, where: str) -> None:
        if not self._is_scripted or where != self._where:
            return
        if self._what == "raise":
            raise KeyError("not\nthere")
        if self._what == "refuse":
            raise ValueError("tensor w is missing from model.safetensors")
        if self._what == "lose":
            self._vitals.waiting(text_field("all_to_all on ep"))
            raise RuntimeError("Connection closed by peer")
        if self._what == "exit":
            os._exit(7)
        while self._what == "spin":
            time.sleep(0.01)
        if self._what == "hang":
            self._vitals.waiting(text_field("all_gather on tp"))
            time.sleep(600)
        os.kill(os.getpid(), getattr(signal, self._what))


def result_bytes(step_id: int, rank: int) -> bytes:
    """What runtime/result_codec.py would write, without its imports."""
    body = struct.pack("<iii", 1, step_id, rank) + b"\0"
    scalars = struct.pack("<4sHHqiii", b"LSRS", 1, 0, step_id, NUM_ROWS, WIDTH, -1)
    return scalars + struct.pack("<I", zlib.crc32(body, zlib.crc32(scalars))) + body


if __name__ == "__main__":
    main(FakeRank)
