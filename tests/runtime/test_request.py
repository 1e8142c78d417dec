"""Sampling parameters are checked where they are made: every fault is a ValueError that names field and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config import EngineConfig, Schedule
from runtime.request import SamplingParams
from runtime.sampling_params import check_vocabulary, encode_params
from tests.fakes import ToyModel, load_toy
from tests.runtime.driving import ask, plain_decode, run_all, toy_engine

NAN, INF = float("nan"), float("inf")
WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, NAN, INF, "1", None, True),
    "top_k": (-1, 1.5, "3", None, True),
    "top_p": (0, -0.5, 1.01, NAN, "1", None),
    "min_p": (-0.01, 1.01, NAN, "0"),
    "repetition_penalty": (0, -1, NAN, INF, None),
    "presence_penalty": (-2.01, 2.01, NAN, INF, "0"),
    "frequency_penalty": (-2.01, 2.01, NAN, -INF, None),
    "logit_bias": ({1: 100.5}, {1: -101}, {1: NAN}, {1: "1"}, {"1": 1.0}, {1.5: 1.0}, {i: 0.0 for i in range(301)}),
    "min_tokens": (-1, 1.5, None, 129),
    "max_tokens": (0, -5, 2.5, "7"),
    "seed": (2**63, -(2**63) - 1, 1.5, "1"),
    "choice": (-1, 2**16, None, 0.5),
    "acceptance": ("exact", "", 1),
    "stop": (("",), ("a", ""), "abc", (1,), (b"a",)),
    "stop_token_ids": ((1.5,), ("1",), (None,)),
    "logprobs": (-1, 21, 1.5, True),
    "draft_tokens": (-1, 0.5, "1"),
}
RIGHT: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.0, 1e-9, 2, 1e6),
    "top_k": (0, 1, 10**30, np.int64(3)),
    "top_p": (1e-300, 0.5, 1, np.float32(0.5)),
    "min_p": (0, 1e-300, 1),
    "repetition_penalty": (0.5, 1, 1000),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logit_bias": ({}, {0: -100, 49: 100}),
    "min_tokens": (0, 128),
    "max_tokens": (1, None, 10**30),
    "seed": (None, 0, -(2**63), 2**63 - 1),
    "choice": (0, 2**16 - 1),
    "acceptance": (None, "coupled", "ratio"),
    "stop": ((), ("a", "\n"), ["a"]),
    "stop_token_ids": ((), (0, 49)),
    "logprobs": (None, 0, 20),
    "draft_tokens": (None, 0, 10**30),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} = .*: expected "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values])
def test_every_right_value_runs(name: str, value: Any) -> None:
    """It does not only pass the check, but goes through the engine, sampled; extremes included."""
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 3, name: value}
    if name == "min_tokens":
        sampling["max_tokens"] = max(value, 3)
    if name == "stop" and value:
        assert SamplingParams(**sampling).stop == value  # an engine without a tokenizer refuses them
        return
    if name == "seed" and value is None:
        sampling["temperature"] = 0
    request = ask(0, [1, 2, 3], **sampling)
    outcome = run_all(toy_engine(load_toy(), max_model_len=256), [request])["0"]
    assert outcome.error is None
    if sampling.get("acceptance") != "ratio":
        assert outcome.token_ids == plain_decode(ToyModel(), request, max_model_len=256)[0]


def test_min_tokens_above_max_tokens_are_refused_and_without_a_maximum_are_not() -> None:
    with pytest.raises(ValueError, match="min_tokens = 6: expected at most max_tokens"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=10**9, max_tokens=None).min_tokens == 10**9


@pytest.mark.parametrize(
    ("params", "coupled"),
    [
        ({}, False),
        ({"seed": 0}, True),
        ({"seed": 1}, True),
        ({"acceptance": "coupled"}, True),
        ({"seed": 1, "acceptance": "ratio"}, False),
    ],
)
def test_a_seed_chooses_the_coupled_form(params: dict[str, Any], coupled: bool) -> None:
    assert SamplingParams(**params).coupled == coupled


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in RIGHT.items()}))
def test_all_that_is_accepted_can_be_encoded(values: dict[str, Any]) -> None:
    if values.get("max_tokens", 128) == 1 and values.get("min_tokens", 0) > 1:
        values["max_tokens"] = None  # the only rule between two fields
    params = SamplingParams(**values)
    check_vocabulary(params, 50)
    encoded = encode_params(params, prompt_len=5, default_seed=0, eos_token_ids=(1,))
    assert len(encoded.rows) == 1
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        assert np.isfinite(encoded.rows[name]).all()


@pytest.mark.parametrize(
    ("schedule", "device", "ahead"),
    [("auto", "cpu", False), ("auto", "cuda:1", True), ("ahead", "cpu", True), ("settled", "cuda", False)],
)
def test_auto_plans_ahead_only_where_there_is_a_device_to_overlap_with(
    schedule: Schedule, device: str, ahead: bool
) -> None:
    assert EngineConfig(model=Path("m"), schedule=schedule, device=device).plans_ahead is ahead
