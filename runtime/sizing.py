"""How long a request may be and how many KV pages there are: pure functions of configuration and model."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config import EngineConfig
from runtime.loading import ModelFacts


@dataclass(frozen=True, kw_only=True)
class Sizes:
    max_model_len: int
    num_pages: int  # page 0, the dummy, included


def choose_sizes(config: EngineConfig, facts: ModelFacts) -> Sizes:
    """Enough pages for every slot at full length, within `kv_cache_bytes`, unless the configuration says otherwise.

    Raises ValueError when a length exceeds what the model was made for, or when no page fits.
    """
    longest = facts.max_position_embeddings
    max_model_len = config.max_model_len if config.max_model_len is not None else longest
    if max_model_len > longest:
        raise ValueError(f"max_model_len = {max_model_len}: the model has max_position_embeddings = {longest}")
    if config.num_pages is not None:
        return Sizes(max_model_len=max_model_len, num_pages=config.num_pages)
    page_bytes = facts.kv_spec.bytes_per_position * config.page_size
    wanted = config.max_num_seqs * -(-max_model_len // config.page_size) + 1
    num_pages = min(wanted, config.kv_cache_bytes // page_bytes)
    if num_pages < 2:
        raise ValueError(
            f"kv_cache_bytes = {config.kv_cache_bytes}: two pages of {config.page_size} positions take "
            f"{2 * page_bytes} bytes"
        )
    return Sizes(max_model_len=max_model_len, num_pages=num_pages)
