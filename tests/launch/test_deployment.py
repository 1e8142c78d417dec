"""What a deployment sets aside before its ranks start."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.deployment import plan_bytes
from runtime.config import EngineConfig
from runtime.plan import encode_step
from runtime.rank_messages import frame_plans
from runtime.request import MAX_LOGIT_BIAS, GenerateRequest, SamplingParams
from runtime.sampling_params import encode_params
from runtime.scheduler import SchedulerLimits
from runtime.sizing import Sizes
from runtime.step_planner import StepPlanner


@pytest.mark.parametrize("vocab_size", [500, 8000])
@pytest.mark.parametrize("dp", [1, 2])
def test_the_largest_plan_fits_into_the_ring(dp: int, vocab_size: int) -> None:
    """Every slot gets a request in one step, each with all that a request can bring along."""
    sizes = Sizes(max_model_len=32, num_pages=1000)
    config = EngineConfig(model=Path("none"), max_num_seqs=64, dp=dp)
    limits = SchedulerLimits(
        max_num_seqs=64, max_model_len=32, page_size=16, num_pages=1000, prefill_chunk_size=512, k=1, lookahead=1,
        prefix_cache=False,
    )
    steps = StepPlanner(config, limits)
    sampling = SamplingParams(
        max_tokens=4, min_tokens=2, stop_token_ids=tuple(range(vocab_size)), frequency_penalty=0.5,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0),
    )
    params = encode_params(sampling, prompt_len=8, default_seed=0, eos_token_ids=())
    for i in range(64 * dp):
        request = GenerateRequest(request_id=str(i), prompt_token_ids=tuple(range(8)), sampling=sampling)
        steps.add(request, limit=12, params=params)
    plans = steps.schedule()
    assert plans is not None
    assert all(len(plan.arrays.new_slots) == 64 for plan in plans)
    assert len(frame_plans(1, encode_step(plans))) <= plan_bytes(config, sizes, vocab_size)
