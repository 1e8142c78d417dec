"""A request as the scheduler sees it: its tokens, how far it is prefilled, where it sits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.kv_pages import chain_hash
from runtime.request import GenerateRequest
from runtime.sampling_params import EncodedParams


@dataclass(eq=False)
class RequestState:
    """Mutable books of one live request. `tokens` are committed; a preempted request keeps nothing else."""

    request: GenerateRequest
    group: int  # its dp group
    arrival: int
    limit: int  # committed length at which the request ends, whatever it says
    params: EncodedParams
    tokens: list[int]
    slot: int = -1  # -1: not admitted
    prefill_position: int = 0  # first position not yet planned
    prefill_end: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_restarts: int = 0  # how often the ranks were lost while it ran
    page_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def resumes(self) -> bool:
        """Whether its prefill ends in front of committed output tokens, so that nothing is sampled from it."""
        return len(self.tokens) > self.num_prompt_tokens

    def hashes(self, num_pages: int, page_size: int, lookahead: int) -> list[bytes]:
        """Chained hashes of the first `num_pages` pages, computed once each."""
        tokens: NDArray[np.int32] | None = None
        while len(self.page_hashes) < num_pages:
            begin = len(self.page_hashes) * page_size
            end = begin + page_size + lookahead
            assert end <= len(self.tokens), "a page is hashed with the tokens that its last entry depends on"
            if tokens is None:
                first = begin
                tokens = np.array(self.tokens[first : num_pages * page_size + lookahead], np.int32)
            previous = self.page_hashes[-1] if self.page_hashes else b""
            self.page_hashes.append(chain_hash(previous, tokens[begin - first : end - first]))
        return self.page_hashes[:num_pages]
