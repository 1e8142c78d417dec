"""The settings that must not change ids, and how a set of prompts is run under one of them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.deployment import start
from runtime.config import EngineConfig, Schedule, Split, Storage
from runtime.engine import Engine
from runtime.loading import load_model
from runtime.request import GenerateRequest, RequestStats, SamplingParams
from runtime.serve.tokenizer import encode_prompt, load_tokenizer
from tests.oracles.hf import Difference, HfOracle
from tests.rank_threads import engine_over_threads

DATA = Path(__file__).resolve().parent.parent / "data"
MAX_ALLOWED_SHARE = 0.02
SEEDED = SamplingParams(max_tokens=64, temperature=0.8, top_p=0.95, seed=0)
GREEDY = SamplingParams(max_tokens=64)


@dataclass(frozen=True, kw_only=True)
class Setting:
    k: int = 1
    chunk: int = 512
    small_pool: bool = False
    prefix_cache: bool = True
    batch: int = 8
    schedule: Schedule = "ahead"
    storage: Storage = "float32"
    tp: int = 1
    dp: int = 1
    split: Split = "auto"

    def __str__(self) -> str:
        alone = (self.tp, self.dp, self.split) == (1, 1, "auto")
        return ("" if alone else f"tp={self.tp} dp={self.dp} split={self.split} ") + (
            f"k={self.k} chunk={self.chunk} pool={'small' if self.small_pool else 'ample'} "
            f"prefix={'on' if self.prefix_cache else 'off'} batch={self.batch} {self.schedule} {self.storage}"
        )


AXES: dict[str, tuple[object, ...]] = {
    "k": (0, 1, 2, 3),
    "chunk": (16, 512),
    "small_pool": (False, True),
    "prefix_cache": (True, False),
    "batch": (1, 8, 32),
    "schedule": ("ahead", "settled"),
    "storage": ("float32", "auto"),
}


def one_axis_at_a_time() -> list[Setting]:
    base = Setting()
    settings = [base]
    for name, values in AXES.items():
        settings += [replace(base, **{name: v}) for v in values if v != getattr(base, name)]  # type: ignore[arg-type]
    return settings


def layouts() -> list[Setting]:
    """Ranks and halves: each layout, split or not, at k = 1; then other k, small pools and batches across them."""
    shapes = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
    settings = [Setting(tp=tp, dp=dp, split=split) for tp, dp in shapes for split in ("off", "on")]
    settings += [Setting(split="on", k=k) for k in (0, 1, 3)]
    settings += [
        Setting(tp=2, k=0, split="on"), Setting(tp=4, k=3), Setting(dp=2, k=3, split="on", batch=32),
        Setting(dp=4, k=0),
        Setting(tp=2, dp=2, k=0, batch=1), Setting(tp=2, dp=2, k=3, split="on", chunk=16, schedule="settled"),
        Setting(tp=2, small_pool=True), Setting(tp=2, dp=2, small_pool=True, split="on", prefix_cache=False),
        Setting(dp=4, k=2, batch=1, split="on"),
    ]
    return settings


def pairwise(count: int = 20, seed: int = 0) -> list[Setting]:
    """`count` random settings, each chosen to cover as many value pairs as possible that none covered before."""
    rng = random.Random(seed)
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    covered: set[tuple[object, ...]] = set()
    chosen: list[Setting] = []
    for _ in range(count):
        best = max(rng.sample(every, 60), key=lambda s: len(_pairs(s) - covered))
        covered |= _pairs(best)
        chosen.append(Setting(**best))  # type: ignore[arg-type]
    return chosen


def _pairs(setting: dict[str, object]) -> set[tuple[object, ...]]:
    return {(a, setting[a], b, setting[b]) for a, b in itertools.combinations(setting, 2)}


@dataclass(frozen=True, kw_only=True)
class Run:
    outputs: list[list[int]]
    stats: list[RequestStats]
    num_preemptions: int


def read_prompts(model: Path, name: str = "prompts.jsonl") -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(model)
    lines = (DATA / name).read_text().splitlines()
    return [encode_prompt(tokenizer, json.loads(line)["prompt"]) for line in lines]


def run(
    model: Path, prompts: Sequence[tuple[int, ...]], setting: Setting, samplings: Sequence[SamplingParams],
    *, processes: bool = False,
) -> Run:
    """Generate from all prompts under `setting`. A small pool holds one and a half of the longest requests.

    Several ranks are threads of this process, or with `processes` what a user would start.
    """
    longest = max(len(p) for p in prompts) + 64
    page_size = 16
    config = EngineConfig(
        model=model, draft_tokens=setting.k, draft_method="mtp" if setting.k else "off", storage=setting.storage,
        prefill_chunk_size=setting.chunk, prefix_cache=setting.prefix_cache, max_num_seqs=setting.batch,
        schedule=setting.schedule, page_size=page_size,
        num_pages=longest * 3 // 2 // page_size + 2 if setting.small_pool else None, tp=setting.tp, dp=setting.dp,
        split=setting.split,
    )
    engine = _engine(config, processes=processes)
    requests = [
        GenerateRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    streams = [engine.submit(request) for request in requests]
    outputs, stats = [], []
    for stream, sampling in zip(streams, samplings, strict=True):
        chunks = list(stream)
        assert chunks[-1].stats is not None
        assert chunks[-1].error is None, chunks[-1].error
        outputs.append([t for chunk in chunks for t in chunk.token_ids])
        assert_complete(outputs[-1], sampling, engine.facts.eos_token_ids)
        stats.append(chunks[-1].stats)
    while engine.has_work():
        engine.step()
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
    return Run(outputs=outputs, stats=stats, num_preemptions=sum(s.num_preemptions for s in engine.planner.schedulers))


def _engine(config: EngineConfig, *, processes: bool) -> Engine:
    if config.layout.ep == 1:
        return Engine(config, load_model(config))
    return Engine(config, deployment=start(config)) if processes else engine_over_threads(config)[0]


def assert_complete(output: Sequence[int], sampling: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """The oracle judges the tokens that there are; that there are neither too few nor too many is judged here."""
    ends = [] if sampling.ignore_eos else [i for i, token in enumerate(output) if token in eos_token_ids]
    assert sampling.max_tokens is not None
    expected = min([sampling.max_tokens, *(end + 1 for end in ends)])
    assert len(output) == expected, f"{len(output)} tokens, the request should have ended after {expected}: {output}"


def compare(
    oracle: HfOracle, prompts: Sequence[tuple[int, ...]], outputs: Iterable[list[int]],
    samplings: Sequence[SamplingParams],
) -> dict[int, Difference]:
    """Differences by prompt number."""
    found = {}
    for i, (prompt, output, sampling) in enumerate(zip(prompts, outputs, samplings, strict=True)):
        difference = oracle.check(prompt, output, sampling)
        if difference is not None:
            found[i] = difference
    return found


def seeded(count: int) -> list[SamplingParams]:
    return [replace(SEEDED, seed=1000 + i) for i in range(count)]


def assert_exact(found: dict[int, Difference], count: int, label: str) -> None:
    """The comparison rule: only ties within rounding may differ, and few of them."""
    wrong = {i: d for i, d in found.items() if not d.allowed}
    assert not wrong, f"{label}: ids differ from the oracle's: {wrong}"
    assert len(found) <= MAX_ALLOWED_SHARE * count, f"{label}: {len(found)} of {count} prompts at a tie: {found}"
