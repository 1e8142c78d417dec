"""Sizes of an engine: what the configuration says, what follows from the model, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config import EngineConfig
from runtime.loading import local_device
from runtime.sizing import choose_sizes
from tests.fakes import load_toy

PAGE_BYTES = 2 * 16 * 8 * 4  # two layers, width 16, float64, four positions


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model=Path("toy"), **{"page_size": 4, "max_num_seqs": 3, **settings})


def test_every_slot_at_full_length_and_the_dummy_page() -> None:
    sizes = choose_sizes(config(), load_toy(max_len=30).facts)
    assert (sizes.max_model_len, sizes.num_pages) == (30, 3 * 8 + 1)


def test_within_the_bytes_allowed() -> None:
    assert choose_sizes(config(kv_cache_bytes=5 * PAGE_BYTES + 1), load_toy(max_len=30).facts).num_pages == 5


def test_what_the_configuration_says_counts() -> None:
    sizes = choose_sizes(config(max_model_len=12, num_pages=7), load_toy(max_len=30).facts)
    assert (sizes.max_model_len, sizes.num_pages) == (12, 7)


def test_what_cannot_be_is_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match="max_model_len = 31: the model has max_position_embeddings = 30"):
        choose_sizes(config(max_model_len=31), load_toy(max_len=30).facts)
    with pytest.raises(ValueError, match=f"kv_cache_bytes = {PAGE_BYTES}: two pages .* {2 * PAGE_BYTES} bytes"):
        choose_sizes(config(kv_cache_bytes=PAGE_BYTES), load_toy(max_len=30).facts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0), ("max_num_seqs", 0), ("prefill_chunk_size", 0), ("page_size", 0), ("draft_tokens", -1),
        ("draft_tokens", 17), ("num_pages", 1), ("max_model_len", 1),
    ],
)
def test_a_wrong_size_is_named(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{name} = {value}: expected "):
        config(**{name: value})


@pytest.mark.parametrize(("method", "drafts", "k"), [("mtp", 3, 3), ("mtp", 0, 0), ("off", 3, 0)])
def test_k_is_zero_when_drafting_is_off(method: str, drafts: int, k: int) -> None:
    assert config(draft_method=method, draft_tokens=drafts).k == k


def test_ranks_share_the_cpu_and_each_has_an_accelerator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [local_device("cpu", rank, 4) for rank in range(4)] == ["cpu"] * 4
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert [local_device("cuda", rank, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert local_device("cuda:1", 0, 1) == "cuda:1"
    for name, ranks in (("cuda", 3), ("cuda:0", 2)):
        with pytest.raises(ValueError, match=rf"device = '{name}': {ranks} ranks need .* has 2"):
            local_device(name, 0, ranks)
