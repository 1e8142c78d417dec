"""Host work that a step exposes: the engine's loop around a device that only waits (target 8 ms, drafter 0.3 ms).

Prints one JSON line: `exposed_percent` is how much longer a step takes than the device alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.plan import StepPlan, StepResult, encode
from runtime.request import GenerateRequest, SamplingParams
from tests.fakes import load_toy


class WaitingDevice:
    """Takes the place of the channel. Like an accelerator it needs no interpreter: steps queue up on a time line, and
    counts are there when the target's time has passed, before the drafter's."""

    def __init__(self, target_s: float, drafter_s: float) -> None:
        self._target_s, self._drafter_s = target_s, drafter_s
        self._busy_until = 0.0
        self._rng = np.random.default_rng(0)

    def send(self, plan: StepPlan) -> WaitingCounts:
        encode(plan)
        ready = max(time.perf_counter(), self._busy_until) + self._target_s
        self._busy_until = ready + self._drafter_s
        rows = plan.num_rows
        verify = np.arange(rows) < plan.num_verify
        drawn = np.where(verify, self._rng.integers(1, plan.k + 2, rows), plan.arrays.samples).astype(np.int32)
        ids = self._rng.integers(2, 40, (rows, 1 + plan.k)).astype(np.int32)
        result = StepResult(step_id=plan.step_id, counts=drawn, token_ids=ids, bad=np.zeros(rows, bool))
        return WaitingCounts(ready, result)

    def raise_failure(self) -> None:
        """This device never fails."""

    def close(self) -> None:
        """Nothing to end."""


class WaitingCounts:
    """Stands for a future: `result` sleeps until the counts are there."""

    def __init__(self, ready: float, result: StepResult) -> None:
        self._ready, self._result = ready, result

    def result(self) -> StepResult:
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return self._result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    results = {}
    for schedule in ("ahead", "settled"):
        config = EngineConfig(
            model=Path("toy"), max_num_seqs=args.requests, max_model_len=2048, page_size=64, schedule=schedule,
            prefill_chunk_size=16 * args.requests,
        )
        engine = Engine(config, load_toy(max_len=2048))
        engine._channel.close()
        engine._channel = WaitingDevice(0.008, 0.0003)  # type: ignore[assignment]
        for i in range(args.requests):
            prompt = tuple(range(2, 18))
            sampling = SamplingParams(max_tokens=2000)
            engine.submit(GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
        for _ in range(5):
            engine.step()
        times = []
        for _ in range(args.steps):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        results[schedule] = statistics.median(times)
        engine.close()
    alone = 0.0083
    print(json.dumps({
        "requests": args.requests, "device_ms": round(alone * 1e3, 3),
        **{f"{name}_ms": round(t * 1e3, 3) for name, t in results.items()},
        **{f"{name}_exposed_percent": round(100 * (t / alone - 1), 2) for name, t in results.items()},
    }))


if __name__ == "__main__":
    main()
