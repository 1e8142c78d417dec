"""Ranks in lockstep: the same collectives on all of them under uneven load, and the same ids whatever rounds where."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import runtime.step_planner as step_planner
from parallel.ledger import Ledger
from runtime.config import EngineConfig
from runtime.engine import Engine
from runtime.loading import LoadedModel
from runtime.request import FinishReason, SamplingParams
from runtime.row_share import RowShare
from tests import rank_threads, thread_group
from tests.rank_threads import engine_over_threads
from tests.runtime.driving import Outcome, ask

MAX_LEN = 48


def config(model: Path, **settings: Any) -> EngineConfig:
    k = settings.pop("k", 1)
    defaults: dict[str, Any] = dict(
        storage="float32", max_model_len=MAX_LEN, max_num_seqs=3, prefill_chunk_size=16, page_size=4, num_pages=26,
        debug=True, draft_tokens=k, draft_method="mtp" if k else "off",
    )
    return EngineConfig(model=model, **{**defaults, **settings})


def uneven_load(engine: Engine) -> dict[str, Outcome]:
    """One request alone at first, then more than fit in one group, one near the context limit, one abort."""
    outcomes: dict[str, Outcome] = {}

    def submit(name: str, prompt_len: int, **sampling: Any) -> None:
        outcomes[name] = Outcome()
        engine.submit(ask(name, range(100, 100 + prompt_len), **sampling))

    submit("alone", 5, max_tokens=12)
    step = 0
    while engine.has_work():
        if step == 4:
            submit("near the limit", MAX_LEN - 3, max_tokens=50)
            for i in range(4):
                submit(f"long {i}", 17 + i, max_tokens=26, temperature=0.5 * (i % 2), seed=i)
            submit("aborted", 9, max_tokens=40)
        if step == 9:
            engine.abort("aborted")
        for chunk in engine.step():
            outcomes[chunk.request_id].add(chunk)
        step += 1
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
    assert outcomes["near the limit"].finish_reason is FinishReason.LENGTH
    assert outcomes["aborted"].finish_reason is FinishReason.ABORT
    return outcomes


def ids(outcomes: dict[str, Outcome]) -> dict[str, list[int]]:
    return {name: outcome.token_ids for name, outcome in outcomes.items() if name != "aborted"}


def assert_ledgers_agree(ledgers: list[Ledger], tp: int) -> None:
    """Everything over all ranks is equal on all of them, everything in an attention group on all of its ranks."""
    for axis, size in (("ep", len(ledgers)), ("tp", tp)):
        for begin in range(0, len(ledgers), size):
            first, *others = ([e for e in ledger.entries if e[2] == axis] for ledger in ledgers[begin : begin + size])
            assert first or size == 1
            for other in others:
                assert other == first


@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        (dict(dp=4, k=1), False), (dict(dp=4, k=2, split="on", dispatch="all_gather"), False),
        (dict(dp=2, tp=2, k=3, dispatch="all_gather", num_pages=16), True),
        (dict(dp=2, tp=2, k=1, split="on", num_pages=16), True),
        (dict(dp=2, tp=2, k=3, num_pages=16), True), (dict(tp=4, k=1, split="on", num_pages=20), True),
        (dict(dp=2, tp=2, k=0, split="on", num_pages=16), True),
    ],
    ids=str,
)
def test_uneven_load(minnow: Path, settings: dict[str, Any], preempts: bool) -> None:
    alone = ids(uneven_load(Engine(config(minnow, k=settings["k"]))))
    engine, channel = engine_over_threads(config(minnow, **settings))
    assert ids(uneven_load(engine)) == alone
    assert_ledgers_agree(channel.ledgers, settings.get("tp", 1))
    steps = sorted({entry[0] for entry in channel.ledgers[0].entries})
    assert steps == list(range(1, steps[-1] + 1)), "each step writes down its own number"
    assert {entry[1] for entry in channel.ledgers[0].entries} == ({0, 1} if settings.get("split") == "on" else {0})
    assert (sum(s.num_preemptions for s in engine.planner.schedulers) > 0) == preempts


def test_without_dummy_rows_ranks_fall_out_of_step(minnow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_planner, "with_dummies", lambda plan, _count: plan)
    monkeypatch.setattr(step_planner, "without_dummies", lambda result, _first, _count: result)
    monkeypatch.setattr(rank_threads, "TIMEOUT_S", 3.0)
    monkeypatch.setattr(thread_group, "TIMEOUT_S", 4.0)
    engine, _ = engine_over_threads(config(minnow, dp=2, k=3))
    with pytest.raises(RuntimeError, match="ranks disagree|only ranks|ranks hang"):
        uneven_load(engine)
    engine.close()


class Nudged:
    """A target whose logits come out 1e-6 higher here and there, differently in every call."""

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner, self._generator = inner, torch.Generator().manual_seed(seed)

    def allocate_kv(self, *args: Any) -> list[Tensor]:
        pages: list[Tensor] = self._inner.allocate_kv(*args)
        return pages

    def forward(self, *args: Any) -> Tensor:
        hidden: Tensor = self._inner.forward(*args)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._inner.logits(hidden)
        pairs = logits.view(len(logits), -1, 2)
        pairs[..., 1] = pairs[..., 0]  # every token has an equal neighbour: the arg-max is a tie in every row
        return logits + 1e-6 * torch.randint(0, 2, logits.shape, generator=self._generator)


def nudge(seeds: Callable[[int], int]) -> Callable[[int, LoadedModel], LoadedModel]:
    return lambda rank, loaded: replace(loaded, model=Nudged(loaded.model, seeds(rank)))


def test_a_tie_that_rounds_differently_on_one_rank_changes_nothing(minnow: Path) -> None:
    """The channel of the test compares the results of all ranks of a group, in every step."""
    engine, channel = engine_over_threads(config(minnow, tp=2, k=1), adapt=nudge(lambda rank: rank))
    uneven_load(engine)
    assert_ledgers_agree(channel.ledgers, 2)


def test_where_every_rank_decides_for_itself_such_a_tie_is_fatal(
    minnow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contrast: the same injection, but each rank gathers whole rows, rounds them itself and decides them all."""

    def gathered(self: RowShare, shard: Tensor) -> Tensor:
        parts = self._group.all_gather(shard).wait().chunk(self._group.size)
        noise = torch.randint(0, 2, (1,), generator=torch.Generator().manual_seed(self._group.rank))
        whole = torch.cat(parts, -1)
        return whole + 1e-6 * noise * (torch.arange(whole.shape[-1]) % 2)

    monkeypatch.setattr(RowShare, "whole_logits", gathered)
    monkeypatch.setattr(RowShare, "mine", lambda _self, values: values)
    monkeypatch.setattr(RowShare, "mine_on_host", lambda _self, values: values)
    monkeypatch.setattr(RowShare, "gather", lambda _self, values: values)
    engine, _ = engine_over_threads(config(minnow, tp=2, k=1), adapt=nudge(lambda _rank: 0))
    with pytest.raises((RuntimeError, AssertionError), match="disagree"):
        uneven_load(engine)
    engine.close()


def test_bytes_moved_for_logits(minnow: Path) -> None:
    """Dealing moves each rank's columns once; gathering on one rank would bring all of them to that rank."""
    engine, channel = engine_over_threads(config(minnow, tp=4, k=1, max_num_seqs=8, num_pages=200))
    for i in range(8):
        engine.submit(ask(i, range(200 + i, 220 + i), max_tokens=20))
    while engine.has_work():
        engine.step()
    engine.close()
    vocab = engine.facts.vocab_size
    shapes = [e[4] for e in channel.ledgers[0].entries if e[2:4] == ("tp", "all_to_all") and e[4][0] == 8]
    targets = [shape for shape in shapes if shape[1] == 2]
    assert targets
    for rows, q_len, columns in targets:
        received = rows // 4 * 3 * q_len * columns * 4  # bytes from the other three ranks
        gathered = rows * q_len * (vocab - columns) * 4  # what one rank alone would receive
        assert columns == vocab // 4
        assert gathered == 4 * received


def test_sampling_parameters_are_dealt_with_their_rows(minnow: Path) -> None:
    """Each row its own method, so that a mix-up of rows between ranks shows in the ids."""
    mixed = [
        SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=1.2, seed=5, top_k=40),
        SamplingParams(max_tokens=16, repetition_penalty=1.4), SamplingParams(max_tokens=16, logit_bias={300: 8.0}),
        SamplingParams(max_tokens=16, temperature=0.7, seed=9, min_p=0.05), SamplingParams(max_tokens=9, logprobs=3),
        SamplingParams(max_tokens=16, min_tokens=10),
    ]

    def generate(engine: Engine) -> dict[str, tuple[list[int], list[int]]]:
        outcomes = {str(i): Outcome() for i in range(len(mixed))}
        for i, sampling in enumerate(mixed):
            engine.submit(replace(ask(i, range(300 + i, 312 + 2 * i)), sampling=sampling))
        while engine.has_work():
            for chunk in engine.step():
                outcomes[chunk.request_id].add(chunk)
        engine.close()
        return {i: (o.token_ids, [p.token_id for p in o.logprobs]) for i, o in outcomes.items()}

    settings: dict[str, Any] = dict(max_num_seqs=8, num_pages=200, k=2)
    alone = generate(Engine(config(minnow, **settings)))
    assert alone["5"][1] == alone["5"][0]
    for tp in (2, 4):
        assert generate(engine_over_threads(config(minnow, tp=tp, **settings))[0]) == alone


@pytest.mark.parametrize("tp", [2, 4])
def test_a_row_that_is_not_finite_fails_on_every_rank_and_alone(minnow: Path, tp: int) -> None:
    """Its logits are decided by one rank; the others must hear that they were bad."""

    class Spoilt(Nudged):
        def logits(self, hidden: Tensor) -> Tensor:
            logits: Tensor = self._inner.logits(hidden)
            return logits.masked_fill((hidden.abs().amax(-1) > 1e30).unsqueeze(-1), torch.nan)

        def forward(self, token_ids: Tensor, metas: Any, kv: Any) -> Tensor:
            hidden: Tensor = self._inner.forward(token_ids, metas, kv)
            return hidden.masked_fill((token_ids == 7).unsqueeze(-1), 1e32)  # only prompt "bad" has token 7

    def spoil(_rank: int, loaded: LoadedModel) -> LoadedModel:
        return replace(loaded, model=Spoilt(loaded.model, 0))

    engine, _ = engine_over_threads(config(minnow, tp=tp, k=1, num_pages=100), adapt=spoil)
    outcomes = {name: Outcome() for name in ("good", "bad", "other")}
    for name, last in (("good", 20), ("bad", 7), ("other", 30)):
        engine.submit(ask(name, [*range(100, 110), last], max_tokens=8))
    while engine.has_work():
        for chunk in engine.step():
            outcomes[chunk.request_id].add(chunk)
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
    assert outcomes["bad"].finish_reason is FinishReason.ERROR
    assert [len(outcomes[name].token_ids) for name in ("good", "other")] == [8, 8]


def test_positions_end_with_the_model(minnow: Path, tmp_path: Path) -> None:
    """A model that knows no position past the context limit: a row near it drafts on, within what the model has."""
    for file in minnow.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    values = json.loads((minnow / "config.json").read_text()) | {"max_position_embeddings": MAX_LEN}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for k in (0, 1, 3):
        engine = Engine(config(tmp_path, k=k))
        short, whole = Outcome(), Outcome()
        engine.submit(ask("short", range(100, 104), max_tokens=40))
        engine.submit(ask("whole", range(100, 100 + MAX_LEN - 6), max_tokens=40))
        while engine.has_work():
            for chunk in engine.step():
                (short if chunk.request_id == "short" else whole).add(chunk)
        engine.close()
        assert (len(short.token_ids), len(whole.token_ids)) == (40, 6)
