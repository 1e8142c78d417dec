"""Where a decode step's time goes on rank 0 of a deployment, as a table: one column for each layout.

    python tests/bench/where_time_goes.py --model CKPT [--batch 8] [--draft-tokens 1]

Ranks run one thread each, under a stopwatch (timed_rank.py) that itself costs some 2 us a call. "planning" is what the
controller spends between taking a step's results and having sent the next plan.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from launch.deployment import start
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.request import GenerateRequest, SamplingParams

P = ParamSpec("P")
T = TypeVar("T")
LAYOUTS = [(2, 1, "off"), (2, 1, "on"), (1, 2, "off"), (1, 2, "on")]
TOKENS = 48


class Clock:
    """Adds up what the calls that go through it take."""

    seconds = 0.0

    def around(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def measure(args: argparse.Namespace, tp: int, dp: int, split: str) -> dict[str, float]:
    """Mean milliseconds of a step, by part."""
    k = args.draft_tokens
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times"
        os.environ["LOCKSTEP_BENCH_TIMES"] = str(path)
        config = EngineConfig(
            model=args.model, tp=tp, dp=dp, split=split, draft_tokens=k,  # type: ignore[arg-type]
            draft_method="mtp" if k else "off", max_num_seqs=args.batch, max_model_len=256, prefix_cache=False,
        )
        engine = Engine(config, deployment=start(config, module="tests.bench.timed_rank"))
        planner, clock, steps = engine.planner, Clock(), 0
        rng = random.Random(0)
        for i in range(args.batch):
            prompt = tuple(rng.randrange(3, engine.facts.vocab_size) for _ in range(32))
            sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            engine.submit(GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
        planner.schedule = clock.around(planner.schedule)  # type: ignore[method-assign]
        planner.commit = clock.around(planner.commit)  # type: ignore[method-assign]
        while engine.has_work():
            engine.step()
            steps += 1
        engine.close()
        times: dict[str, float] = json.loads(path.read_text())
    times["(planning, on the controller)"] = clock.seconds / steps
    return {name: 1000 * seconds for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--draft-tokens", type=int, default=1)
    args = parser.parse_args()
    columns = [measure(args, *layout) for layout in LAYOUTS]
    names = sorted({name for column in columns for name in column}, key=lambda n: -columns[0].get(n, 0.0))
    heads = [f"tp {tp}, dp {dp}" + (", split" if split == "on" else "") for tp, dp, split in LAYOUTS]
    print("| ms a step | " + " | ".join(heads) + " |")
    print("|---" * (1 + len(heads)) + "|")
    for name in names:
        print(f"| {name} | " + " | ".join(f"{column.get(name, 0.0):.2f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
