"""Host work that a step exposes: the engine's loop around a device that only waits (target 8 ms, drafter 0.3 ms).

Prints one JSON line: `exposed_percent` is how much longer a step takes than the device alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.plan import StepPlan, StepResult, encode
from runtime.request import GenerateRequest, SamplingParams
from tests.fakes import load_toy


class WaitingDevice:
    """Takes the place of the channel: publishes made-up counts after the target's time, then the drafter's passes."""

    def __init__(self, target_s: float, drafter_s: float) -> None:
        self._target_s, self._drafter_s = target_s, drafter_s
        self._pool = ThreadPoolExecutor(1)
        self._rng = np.random.default_rng(0)

    def send(self, plan: StepPlan) -> Future[StepResult]:
        encode(plan)
        counts: Future[StepResult] = Future()
        self._pool.submit(self._run, plan, counts)
        return counts

    def close(self) -> None:
        self._pool.shutdown()

    def _run(self, plan: StepPlan, counts: Future[StepResult]) -> None:
        rows = plan.num_rows
        verify = np.arange(rows) < plan.num_verify
        drawn = np.where(verify, self._rng.integers(1, plan.k + 2, rows), plan.arrays.samples).astype(np.int32)
        ids = self._rng.integers(2, 40, (rows, 1 + plan.k)).astype(np.int32)
        time.sleep(self._target_s)
        counts.set_result(StepResult(step_id=plan.step_id, counts=drawn, token_ids=ids, bad=np.zeros(rows, bool)))
        time.sleep(self._drafter_s)


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
    alone = _device_alone(args.steps)
    print(json.dumps({
        "requests": args.requests, "device_ms": round(alone * 1e3, 3),
        **{f"{name}_ms": round(t * 1e3, 3) for name, t in results.items()},
        **{f"{name}_exposed_percent": round(100 * (t / alone - 1), 2) for name, t in results.items()},
    }))


def _device_alone(steps: int) -> float:
    """Median time of a step when nothing is to be planned: the sleeps and their own overhead."""
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        time.sleep(0.008)
        time.sleep(0.0003)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    main()
