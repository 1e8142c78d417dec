"""`lockstep bench decode`: throughput by the method of peers' offline benchmarks, so that figures compare.

Decode tokens/s at batch B = B (N - 1) / (T(N) - T(1)): what generating N instead of 1 token costs, prefill and start-up
excluded. Random prompts measure the cost of a step; on checkpoints whose greedy next token is t + 1, `succ` prompts
give about 100 % acceptance at the real cost of a step.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from launch.generate import make_engine
from runtime.request import GenerateRequest, RequestStats, SamplingParams

if TYPE_CHECKING:
    from runtime.config import EngineConfig
    from runtime.engine import Engine

PROMPT_KINDS = ("random", "repeat", "succ")
FIRST_ID = 3  # below: BOS, EOS, padding in the usual numbering


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Sizes in tokens. Raises ValueError naming the option."""

    batch: int = 1
    prompt_len: int = 32
    output_len: int = 128
    prompts: str = "random"
    repeat: int = 3

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_len", "output_len", "repeat"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected an integer >= 1")
        if self.prompts not in PROMPT_KINDS:
            raise ValueError(f"prompts = {self.prompts!r}: expected one of {', '.join(PROMPT_KINDS)}")


@dataclass(frozen=True, kw_only=True)
class _Run:
    wall_s: float
    cpu_s: float
    stats: Sequence[RequestStats]


def measure(config: EngineConfig, options: DecodeOptions) -> dict[str, Any]:
    """Figures of one model, batch and draft length; the median of `repeat` runs. Times exclude loading."""
    config = replace(config, prefix_cache=False, max_num_seqs=options.batch)
    start = time.perf_counter()
    engine = make_engine(config)
    load_s = time.perf_counter() - start
    try:
        _check_length(options, engine.sizes.max_model_len)
        prompts = _prompts(options, engine.facts.vocab_size)
        _generate(engine, prompts, 2)
        short = [_generate(engine, prompts, 1) for _ in range(options.repeat)]
        whole = [_generate(engine, prompts, options.output_len) for _ in range(options.repeat)]
    finally:
        engine.close()
    return _figures(config, options, short, whole, load_s) | {"weight_bytes_read": list(engine.bytes_read)}


def _figures(
    config: EngineConfig, options: DecodeOptions, short: list[_Run], whole: list[_Run], load_s: float
) -> dict[str, Any]:
    t1, tn = (statistics.median(run.wall_s for run in runs) for runs in (short, whole))
    c1, cn = (statistics.median(run.cpu_s for run in runs) for runs in (short, whole))
    alone = config.layout.ep == 1  # else most of the work is done by processes whose time is not in `cpu_s`
    num_decoded = options.batch * (options.output_len - 1)
    stats = [s for run in whole for s in run.stats]
    drafted, accepted, steps = (sum(getattr(s, name) for s in stats) for name in ("drafted", "accepted", "steps"))
    return {
        "model": config.model.name,
        "device": config.device,
        "storage": config.storage,
        "threads": config.threads,
        "tp": config.tp,
        "dp": config.dp,
        "split": config.split,
        "batch": options.batch,
        "prompt_len": options.prompt_len,
        "output_len": options.output_len,
        "prompts": options.prompts,
        "draft_tokens": config.k,
        "prefill_tokens_per_s": round(options.batch * options.prompt_len / t1, 1),
        "decode_tokens_per_s": round(num_decoded / (tn - t1), 1) if num_decoded and tn > t1 else None,
        "decode_tokens_per_cpu_s": round(num_decoded / (cn - c1), 1) if num_decoded and cn > c1 and alone else None,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "tokens_per_step": round(sum(s.num_output_tokens - 1 for s in stats) / steps, 4) if steps else None,
        "t1_s": round(t1, 4),
        "tn_s": round(tn, 4),
        "load_s": round(load_s, 3),
    }


def _check_length(options: DecodeOptions, max_model_len: int) -> None:
    length = options.prompt_len + options.output_len
    if length > max_model_len:
        raise ValueError(
            f"prompt_len {options.prompt_len} + output_len {options.output_len} = {length} tokens: expected at most "
            f"max_model_len = {max_model_len}"
        )


def _prompts(options: DecodeOptions, vocab_size: int) -> list[tuple[int, ...]]:
    """Token ids of each prompt, the same for every run of the same options."""
    source = random.Random(1)
    length = options.prompt_len
    room = vocab_size - length - options.output_len - 2
    if options.prompts == "succ" and room <= FIRST_ID:
        raise ValueError(
            f"prompts = 'succ': prompt_len {length} + output_len {options.output_len} ids in a row do not fit in a "
            f"vocabulary of {vocab_size}"
        )

    def one() -> tuple[int, ...]:
        if options.prompts == "succ":
            first = source.randrange(FIRST_ID, room)
            return tuple(range(first, first + length))
        unit = length if options.prompts == "random" else 8
        ids = [source.randrange(FIRST_ID, vocab_size) for _ in range(unit)]
        return tuple(ids[i % unit] for i in range(length))

    return [one() for _ in range(options.batch)]


def _generate(engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> _Run:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    stats: list[RequestStats] = []
    wall, cpu = time.perf_counter(), time.process_time()
    for i, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work():
        for chunk in engine.step():
            if chunk.error is not None:
                raise RuntimeError(f"request {chunk.request_id}: {chunk.error}")
            if chunk.stats is not None:
                stats.append(chunk.stats)
    return _Run(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu, stats=stats)
