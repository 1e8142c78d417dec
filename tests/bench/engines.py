"""One engine behind one call: `generate(prompts, num_tokens) -> seconds`, greedy, EOS ignored, no text.

Run as a script it measures one engine in its own interpreter and prints one JSON line per figure; side_by_side.py
starts it for each engine in turn. Imports of an engine happen in its own function, so that each runs in an environment
that has only that engine.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], float]
_PROMPT_LEN = 32


def lockstep(model: Path, args: argparse.Namespace) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    from launch.generate import make_engine
    from runtime.config import EngineConfig
    from runtime.request import GenerateRequest, SamplingParams

    k = args.draft_tokens
    engine = make_engine(EngineConfig(
        model=model, draft_tokens=k, draft_method="mtp" if k else "off", storage=args.storage, threads=args.threads,
        max_num_seqs=32, max_model_len=1024, prefix_cache=False, tp=args.tp, dp=args.dp, split=args.split,
        schedule=args.schedule, exchange=args.exchange,
    ))
    atexit.register(engine.close)
    counts = {"drafted": 0, "accepted": 0}

    def generate(prompts: list[list[int]], num_tokens: int) -> float:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        begin = time.perf_counter()
        streams = [
            engine.submit(GenerateRequest(request_id=str(i), prompt_token_ids=tuple(p), sampling=sampling))
            for i, p in enumerate(prompts)
        ]
        last = [list(stream)[-1] for stream in streams]
        seconds = time.perf_counter() - begin
        while engine.has_work():
            engine.step()
        for chunk in last:
            assert chunk.stats is not None
            assert chunk.stats.num_output_tokens == num_tokens
            counts["drafted"] += chunk.stats.drafted
            counts["accepted"] += chunk.stats.accepted
        return seconds

    return generate, lambda: dict(counts)


def transformers(model: Path, args: argparse.Namespace) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    target.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], num_tokens: int) -> float:
        ids = torch.tensor(prompts)
        begin = time.perf_counter()
        with torch.inference_mode():
            out = target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                do_sample=False, eos_token_id=None, pad_token_id=2, use_cache=True,
            )
        assert out.shape[1] == ids.shape[1] + num_tokens
        return time.perf_counter() - begin

    return generate, dict


def vllm(model: Path, args: argparse.Namespace) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if args.tp == 1 else "0|1", "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if args.tp == 1 else "1",
    }.items():
        os.environ[name] = value
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if args.draft_tokens:
        extra["speculative_config"] = {"method": "mtp", "num_speculative_tokens": args.draft_tokens}
    llm = LLM(
        model=str(model), dtype="float32", max_model_len=1024, max_num_seqs=32, enforce_eager=not args.compiled,
        enable_prefix_caching=False, seed=0, tensor_parallel_size=args.tp, **extra,
    )

    def generate(prompts: list[list[int]], num_tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        out = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(o.outputs[0].token_ids) == num_tokens for o in out)
        return seconds

    return generate, dict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("lockstep", "transformers", "vllm"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft-tokens", type=int, default=0)
    parser.add_argument("--storage", default="auto", help="lockstep only")
    parser.add_argument("--compiled", action="store_true", help="vllm only: torch.compile instead of eager")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1, help="lockstep only")
    parser.add_argument("--split", choices=("auto", "on", "off"), default="auto", help="lockstep only")
    parser.add_argument("--exchange", choices=("auto", "shared_memory", "torch"), default="auto", help="lockstep only")
    parser.add_argument("--schedule", choices=("auto", "ahead", "settled"), default="auto", help="lockstep only")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--out-tokens", type=int, default=64)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--prompts", choices=("random", "succ"), default="random")
    parser.add_argument("--no-prefill", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    generate, counts = {"lockstep": lockstep, "transformers": transformers, "vllm": vllm}[args.engine](args.model, args)
    label = args.engine + (" compiled" if args.compiled else "")
    base = dict(
        engine=label, tp=args.tp, dp=args.dp, split=args.split, exchange=args.exchange, schedule=args.schedule,
        model=args.model.name,
        k=args.draft_tokens, threads=args.threads,
        storage=args.storage if args.engine == "lockstep" else "float32",
    )
    generate(_prompts(args, 1, _PROMPT_LEN, 0), 1)
    _emit(base, kind="startup", seconds=round(time.perf_counter() - begin, 2))
    if not args.no_prefill:
        generate(_prompts(args, 1, 512, 1), 1)
        seconds = statistics.median(generate(_prompts(args, 1, 512, 2 + i), 1) for i in range(args.reps))
        _emit(base, kind="prefill", num_tokens=512, tokens_per_s=round(512 / seconds, 1))
    for batch in map(int, args.batches.split(",")):
        _decode(generate, counts, base, batch, args)


def _decode(
    generate: Generate, counts: Callable[[], dict[str, Any]], base: dict[str, Any], batch: int, args: argparse.Namespace
) -> None:
    """Decode alone: the time for N tokens less the time for one, with the CPU time beside it."""
    rates, cpu_rates = [], []
    before = counts()
    for rep in range(args.reps):
        prompts = _prompts(args, batch, _PROMPT_LEN, 100 + rep)
        first = generate(prompts, 1)
        cpu = time.process_time()
        whole = generate(prompts, args.out_tokens)
        cpu = time.process_time() - cpu
        tokens = batch * (args.out_tokens - 1)
        rates.append(tokens / (whole - first))
        cpu_rates.append(tokens / cpu)
    extra = {key: value - before[key] for key, value in counts().items()}
    if extra.get("drafted"):
        extra["acceptance"] = round(extra["accepted"] / extra["drafted"], 3)
    _emit(
        base, kind="decode", batch=batch, tokens_per_s=round(statistics.median(rates), 1),
        tokens_per_cpu_s=round(statistics.median(cpu_rates), 1), reps=[round(r, 1) for r in rates], **extra,
    )


def _prompts(args: argparse.Namespace, count: int, length: int, seed: int) -> list[list[int]]:
    """Random ids, or for `-succ` checkpoints counting ids, whose continuation the head predicts."""
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    rng = random.Random(seed)
    if args.prompts == "random":
        return [[rng.randrange(3, vocab_size) for _ in range(length)] for _ in range(count)]
    starts = [rng.randrange(3, vocab_size - length - args.out_tokens - 2) for _ in range(count)]
    return [list(range(start, start + length)) for start in starts]


def _emit(base: dict[str, Any], **figures: Any) -> None:
    print(json.dumps({**base, **figures}), flush=True)


if __name__ == "__main__":
    main()
