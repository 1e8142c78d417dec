"""Parameters reach their slot as encoded, and penalty counts follow what was committed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mtp.accept import Method
from runtime.request import SamplingParams
from runtime.sampling_params import NO_CAP, PARAM_DTYPE, check_vocabulary, encode_params, stack_params
from runtime.sampling_tables import PenaltyTable, SamplingTable, uses_penalties

VOCAB = 16


def test_every_field_is_encoded() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={3: 1.0, 8: -2.0},
        min_tokens=6,
        seed=-(2**63),
        choice=12,
        stop_token_ids=(5, 2),
        logprobs=0,
        draft_tokens=0,
    )
    encoded = encode_params(params, prompt_len=9, default_seed=4, eos_token_ids=(2, 11))
    row = dict(zip(PARAM_DTYPE.names or (), encoded.rows[0].tolist(), strict=True))
    assert row == {
        "seed": -(2**63),
        "temperature": 0.5,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "top_k": 4,
        "min_tokens": 6,
        "prompt_len": 9,
        "choice": 12,
        "method": Method.COUPLED,
        "max_drafts": 0,
        "num_logprobs": 0,
        "num_bias": 2,
        "num_masked": 3,
    }
    assert encoded.masked_ids.tolist() == [2, 5, 11]
    assert dict(zip(encoded.bias_ids.tolist(), encoded.bias_values.tolist(), strict=True)) == {3: 1.0, 8: -2.0}


def test_bytes_survive_a_plan() -> None:
    encoded = encode_params(SamplingParams(temperature=1, top_k=3), prompt_len=2, default_seed=8, eos_token_ids=())
    assert np.frombuffer(encoded.rows.tobytes(), dtype=PARAM_DTYPE) == encoded.rows


@pytest.mark.parametrize(
    ("params", "method", "seed"),
    [
        (SamplingParams(), Method.GREEDY, 77),
        (SamplingParams(temperature=1), Method.RATIO, 77),
        (SamplingParams(temperature=1, seed=3), Method.COUPLED, 3),
        (SamplingParams(temperature=1, seed=3, acceptance="ratio"), Method.RATIO, 3),
        (SamplingParams(temperature=1, acceptance="coupled"), Method.COUPLED, 77),
        (SamplingParams(temperature=0, acceptance="ratio"), Method.GREEDY, 77),
    ],
)
def test_the_method_follows_seed_and_wish(params: SamplingParams, method: Method, seed: int) -> None:
    row = encode_params(params, prompt_len=1, default_seed=77, eos_token_ids=()).rows[0]
    assert (row["method"], row["seed"], row["max_drafts"]) == (method, seed, NO_CAP)


def test_no_requests_stack_to_none() -> None:
    encoded = stack_params([])
    assert (len(encoded.rows), encoded.rows.dtype) == (0, PARAM_DTYPE)
    SamplingTable(2, "cpu").write(np.empty(0, dtype=np.int64), encoded)


@pytest.mark.parametrize("params", [SamplingParams(logit_bias={16: 1.0}), SamplingParams(stop_token_ids=(-1,))])
def test_ids_outside_the_vocabulary_are_refused(params: SamplingParams) -> None:
    with pytest.raises(ValueError, match=r"token id (16|-1): expected 0\.\.15"):
        check_vocabulary(params, 16)
    check_vocabulary(SamplingParams(logit_bias={15: 1.0}), 16)


def test_flags_are_those_of_the_gathered_rows() -> None:
    table = SamplingTable(4, "cpu")
    for slot, params in (
        (1, SamplingParams(temperature=1, top_k=6, seed=1, logprobs=2)),
        (2, SamplingParams(repetition_penalty=2, min_tokens=1, logit_bias={1: 1.0})),
        (3, SamplingParams(temperature=2, min_p=0.5, top_p=0.5)),
    ):
        table.write(np.array([slot]), encode_params(params, prompt_len=1, default_seed=0, eos_token_ids=(1,)))

    def uses(*slots: int) -> set[str]:
        rows = table.gather(torch.tensor(slots), np.array(slots))
        found = {name for name in rows.uses.__dataclass_fields__ if getattr(rows.uses, name)}
        flags = {"any_coupled": rows.keys.any_coupled, "any_ratio": rows.keys.any_ratio}
        return found | {name for name, flag in flags.items() if flag}

    assert uses(0) == set()
    assert uses(0, 1) == {"any_coupled", "max_top_k"}
    assert uses(2) == {"penalties", "bias", "min_tokens"}
    assert uses(3, 0) == {"any_ratio", "temperature", "min_p", "top_p", "top_p_alone"}
    assert table.gather(torch.tensor([0, 1]), np.array([0, 1])).num_logprobs == 2
    assert table.gather(torch.tensor([0, 2]), np.array([0, 2])).num_logprobs == -1


def test_a_reused_slot_keeps_nothing() -> None:
    table = SamplingTable(2, "cpu")
    long = SamplingParams(temperature=1, logit_bias={1: 1.0, 2: 2.0, 3: 3.0}, min_tokens=2, stop_token_ids=(4, 5))
    short = SamplingParams(logit_bias={9: 0.5})
    for params in (long, short):
        table.write(np.array([1]), encode_params(params, prompt_len=1, default_seed=0, eos_token_ids=()))
    rows = table.gather(torch.tensor([1]), np.array([1]))
    assert rows.bias_ids.tolist() == [[9, -1, -1]]
    assert rows.bias_values.tolist() == [[0.5, 0.0, 0.0]]
    assert rows.masked_ids.tolist() == [[-1, -1]]


def test_counts_follow_random_commits() -> None:
    rng = random.Random(0)
    table = PenaltyTable(9, VOCAB, "cpu")
    live: dict[int, tuple[list[int], list[int]]] = {}
    for _ in range(200):
        action, slot = rng.random(), rng.randrange(1, 9)
        if action < 0.25 and slot not in live:
            prompt, output = rng.choices(range(VOCAB), k=3), rng.choices(range(VOCAB), k=rng.randrange(3))
            table.add(slot, prompt, output)
            live[slot] = (prompt, output)
        elif action < 0.4:
            table.remove(slot)
            live.pop(slot, None)
        else:
            slots = rng.sample(range(9), 4)  # some of them uncounted, maybe the dummy
            tokens = torch.tensor([rng.choices(range(VOCAB), k=3) for _ in slots])
            num_new = torch.tensor([rng.randrange(4) for _ in slots])
            table.commit(torch.tensor(slots), tokens, num_new)
            for idx, committed in enumerate(slots):
                if committed in live:
                    live[committed][1].extend(tokens[idx, : int(num_new[idx])].tolist())
        output_counts, in_prompt = table.gather(torch.arange(9))
        for each in range(9):
            prompt, output = live.get(each, ([], []))
            assert output_counts[each].tolist() == np.bincount(output or [0], minlength=VOCAB).tolist() or not output
            assert int(output_counts[each].sum()) == len(output)
            assert set(in_prompt[each].nonzero().flatten().tolist()) == set(prompt)
        assert table.num_slots_in_use == len(live)


def test_tokens_outside_the_vocabulary_are_not_counted() -> None:
    table = PenaltyTable(3, VOCAB, "cpu")
    table.add(1, [0])
    table.add(2, [0])
    table.commit(torch.tensor([1]), torch.tensor([[-1, VOCAB, 3]]), torch.tensor([3]))
    assert table.gather(torch.tensor([1, 2]))[0].sum(1).tolist() == [1, 0]


def test_which_rows_use_penalties() -> None:
    rows = stack_params(
        [
            encode_params(params, prompt_len=1, default_seed=0, eos_token_ids=())
            for params in (
                SamplingParams(),
                SamplingParams(repetition_penalty=1.1),
                SamplingParams(presence_penalty=-1),
            )
        ]
    ).rows
    assert uses_penalties(rows).tolist() == [False, True, True]


def test_a_write_reaches_a_gather_of_the_same_slots() -> None:
    table = SamplingTable(4, "cpu")
    slots, host = torch.tensor([1, 2]), np.array([1, 2])
    assert table.gather(slots, host) is table.gather(slots, host)
    params = encode_params(SamplingParams(temperature=0.5, seed=1), prompt_len=3, default_seed=0, eos_token_ids=())
    table.write(np.array([2]), params)
    assert table.gather(slots, host).temperature.tolist() == [1.0, 0.5]
