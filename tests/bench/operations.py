"""Which operations a decode step of the target spends its time in, on one thread.

    python tests/bench/operations.py --model CKPT [--batch 8] [--tokens 1] [--context 96]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.weights import WeightSource
from tests.meta_builder import PageBook, Row, build_meta

PAGE_SIZE, NUM_PAGES, STEPS, SHOWN = 16, 600, 5, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1, help="of a row")
    parser.add_argument("--context", type=int, default=96)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load_model_config(args.model)
    with WeightSource(args.model) as source:
        model = DeepseekModel.load(source, config)
    with torch.inference_mode():
        kv, book = model.allocate_kv(NUM_PAGES, PAGE_SIZE), PageBook(NUM_PAGES, PAGE_SIZE)
        end = args.context + args.tokens
        meta = build_meta(
            PAGE_SIZE, [Row(args.context, args.tokens, book.pages_for(end)) for _ in range(args.batch)], []
        )
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, config.vocab_size, (args.batch * args.tokens,), generator=generator)

        def step() -> None:
            model.logits(model.forward(ids, (meta,), kv))

        for _ in range(STEPS):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(STEPS):
                step()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    print(f"{sum(event.self_cpu_time_total for event in events) / STEPS / 1000:.1f} ms a step")
    for event in events[:SHOWN]:
        spent = event.self_cpu_time_total
        calls = event.count / STEPS
        print(f"{event.key:40} {spent / STEPS / 1000:8.2f} ms {calls:7.0f} calls {spent / event.count:8.1f} us")


if __name__ == "__main__":
    main()
