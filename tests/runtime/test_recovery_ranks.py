"""Recovery over several ranks with real shards: ids of a run whose ranks are lost again and again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.channel import Channel
from runtime.config import EngineConfig
from runtime.engine import Deployment, Engine
from runtime.loading import read_facts
from runtime.request import GenerateRequest
from runtime.sizing import choose_sizes
from tests.rank_threads import ThreadChannel
from tests.runtime.driving import Outcome, ask
from tests.runtime.failing_channel import Strikes, failing_engine


def engine_over(config: EngineConfig, strikes: Strikes) -> Engine:
    facts = read_facts(config)
    sizes = choose_sizes(config, facts)

    def deployment(channel: Channel) -> Deployment:
        return Deployment(facts=facts, sizes=sizes, channel=channel, bytes_read=())

    return failing_engine(config, lambda: ThreadChannel(config), deployment, strikes)


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, Outcome]:
    found = {request.request_id: Outcome() for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for chunk in engine.step():
            found[chunk.request_id].add(chunk)
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
    return found


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.2}, {"temperature": 1.0, "seed": 9, "top_p": 0.9}, {},
)


@pytest.mark.parametrize(
    "settings", [dict(dp=2, split="on", draft_tokens=1, schedule="ahead"), dict(tp=2, draft_tokens=2)], ids=str
)
def test_ids_over_ranks_that_are_lost_in_the_middle(minnow: Path, settings: dict[str, Any]) -> None:
    """Four requests in two groups, or in one, at different places of prompt and output; another waits."""
    config = EngineConfig(
        model=minnow, storage="float32", max_model_len=48, max_num_seqs=2, prefill_chunk_size=8, page_size=4,
        debug=True, **settings,
    )
    requests = [ask(i, range(100, 103 + 6 * i), max_tokens=14, **SAMPLINGS[i]) for i in range(5)]
    plain = run(engine_over(config, Strikes()), requests)
    strikes = Strikes(calls=frozenset([4, 17, 30]))
    found = run(engine_over(config, strikes), requests)
    assert strikes.num_attempts == len(strikes.struck) == 3
    assert {i: o.token_ids for i, o in found.items()} == {i: o.token_ids for i, o in plain.items()}
