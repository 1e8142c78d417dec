"""The eager step on a CUDA device gives the ids of the CPU (tests/gpu/run.sh)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.config import EngineConfig, Schedule
from runtime.engine import Engine
from runtime.loading import load_model
from runtime.request import GenerateRequest, SamplingParams
from runtime.serve.tokenizer import encode_prompt, load_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = (
    "def quick_sort(items):\n",
    "The Lord is my shepherd",
    "import os\nimport sys\n\n\ndef main():\n",
    "CREATE TABLE",
)
# Arg-maxes may differ where two logits are closer than the rounding of another product order: most must agree.
MIN_EQUAL = 3


def generate(model: Path, device: str, k: int, schedule: Schedule, sampling: SamplingParams) -> list[list[int]]:
    config = EngineConfig(
        model=model, device=device, draft_tokens=k, draft_method="mtp" if k else "off", storage="float32",
        schedule=schedule, max_model_len=512, prefill_chunk_size=16,
    )
    engine = Engine(config, load_model(config))
    tokenizer = load_tokenizer(model)
    streams = [
        engine.submit(
            GenerateRequest(request_id=str(i), prompt_token_ids=encode_prompt(tokenizer, text), sampling=sampling)
        )
        for i, text in enumerate(PROMPTS)
    ]
    outputs = [[t for chunk in stream for t in chunk.token_ids] for stream in streams]
    while engine.has_work():
        engine.step()
    assert engine.pages_and_slots_in_use() == (0, 0)
    engine.close()
    return outputs


@pytest.mark.parametrize("schedule", ["ahead", "settled"])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("seed", [None, 7])
def test_ids_equal_the_cpus(minnow: Path, k: int, schedule: Schedule, seed: int | None) -> None:
    sampling = SamplingParams(max_tokens=48, temperature=0.0 if seed is None else 0.8, seed=seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = generate(minnow, "cpu", 0, "settled", sampling)
    found = generate(minnow, "cuda", k, schedule, sampling)
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    assert equal >= MIN_EQUAL, f"{equal} of {len(PROMPTS)} outputs equal the CPU's"
