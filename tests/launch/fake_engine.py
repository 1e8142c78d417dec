"""An engine without a model: says fixed words one token a step, in a chosen order of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.config import EngineConfig
from runtime.request import FinishReason, GenerateRequest, RequestStats, TokenChunk


@dataclass
class FakeEngine:
    """Request i says `words`, one a step; requests run one after another, the last submitted first."""

    words: Sequence[str] = ("one", " two", " three")
    max_prompt_tokens: int = 100
    error_for: str | None = None
    raises: Exception | None = None
    config: EngineConfig | None = None
    submitted: list[GenerateRequest] = field(default_factory=list)
    closed: bool = False
    _said: dict[str, int] = field(default_factory=dict)

    def factory(self) -> Callable[[EngineConfig], FakeEngine]:
        def make(config: EngineConfig) -> FakeEngine:
            self.config = config
            return self

        return make

    def submit(self, request: GenerateRequest) -> None:
        if len(request.prompt_token_ids) > self.max_prompt_tokens:
            raise ValueError(f"prompt of {len(request.prompt_token_ids)} tokens: expected at most 100")
        self.submitted.append(request)
        self._said[request.request_id] = 0

    def has_work(self) -> bool:
        return bool(self._said)

    def step(self) -> list[TokenChunk]:
        if self.raises is not None:
            raise self.raises
        request_id = list(self._said)[-1]
        said = self._said[request_id]
        if request_id == self.error_for:
            del self._said[request_id]
            return [TokenChunk(request_id=request_id, finish_reason=FinishReason.ERROR, error="NaN\nin row")]
        self._said[request_id] += 1
        last = said + 1 == len(self.words)
        if last:
            del self._said[request_id]
        return [
            TokenChunk(
                request_id=request_id,
                token_ids=(said + 10,),
                text=self.words[said],
                finish_reason=FinishReason.LENGTH if last else None,
                stats=self._stats() if last else None,
            )
        ]

    def _stats(self) -> RequestStats:
        return RequestStats(
            num_prompt_tokens=1, num_output_tokens=len(self.words), steps=1, drafted=2, accepted=1,
            drafted_per_position=(1, 1), accepted_per_position=(1, 0), ttft_s=0.5, e2e_s=1.5,
        )

    def close(self) -> None:
        self.closed = True
