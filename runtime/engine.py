"""The engine: admit, schedule, publish, run, commit, send. `step()` is the whole loop; read it first."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from runtime.channel import LocalChannel
from runtime.config import EngineConfig
from runtime.device_state import DeviceState
from runtime.executor import Executor
from runtime.loading import LoadedModel, load_model
from runtime.output import OutputState
from runtime.plan import StepResult
from runtime.request import FinishReason, GenerateRequest, TokenChunk
from runtime.request_state import RequestState
from runtime.sampling_params import check_vocabulary, encode_params
from runtime.scheduler import CommittedRow, Scheduler, SchedulerLimits
from runtime.serve.detokenizer import OutputText
from runtime.sizing import Sizes, choose_sizes


@dataclass(frozen=True, kw_only=True)
class _Live:
    state: RequestState
    output: OutputState
    stream: RequestStream


class Engine:
    """Continuous batching over one model. Single-threaded: whoever reads a stream drives the steps."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        self.config = config
        self.loaded = loaded if loaded is not None else load_model(config)
        self.sizes: Sizes = choose_sizes(config, self.loaded)
        self._scheduler = _scheduler(config, self.loaded, self.sizes)
        self._channel = LocalChannel(
            _executor(config, self.loaded, self.sizes), threads=config.threads, inline=not config.plans_ahead,
            through_codec=config.debug,
        )
        self._depth = 1 if config.plans_ahead else 0  # steps in flight while the next one is planned
        self._steps: deque[Future[StepResult]] = deque()
        self._live: dict[str, _Live] = {}
        self._unsent: list[TokenChunk] = []
        self._seeds = random.SystemRandom()

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Queue a request. Raises ValueError, and changes nothing, when it can never run."""
        if request.request_id in self._live:
            raise ValueError(f"request_id {request.request_id!r} is already running")
        limit = self._admissible_limit(request)
        check_vocabulary(request.sampling, self.loaded.vocab_size)
        eos = self.loaded.eos_token_ids
        text = self._output_text(request)
        params = encode_params(
            request.sampling, prompt_len=len(request.prompt_token_ids),
            default_seed=self._seeds.getrandbits(63), eos_token_ids=eos,
        )
        state = self._scheduler.add(request, limit=limit, params=params)
        output = OutputState(request, limit=limit, eos_token_ids=eos, text=text, k=self.config.k)
        stream = RequestStream(self, request.request_id)
        self._live[request.request_id] = _Live(state=state, output=output, stream=stream)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request now; unknown or finished ones are left alone. Its stream ends with finish reason "abort"."""
        live = self._live.get(request_id)
        if live is not None:
            self._unsent.append(self._end(live, live.output.fail(FinishReason.ABORT, None)))

    def step(self) -> list[TokenChunk]:
        """Plan and publish one step, then commit the oldest in flight. Returns the chunks that became ready.

        Raises what a step raised, every time from then on.
        """
        self._channel.raise_failure()
        plan = self._scheduler.schedule()
        if plan is not None:
            self._steps.append(self._channel.send(plan))
        chunks, self._unsent = self._unsent, []
        if self._steps and (plan is None or len(self._steps) > self._depth):
            result = self._steps.popleft().result()
            for row in self._scheduler.commit(result):
                chunks.append(self._chunk(row, result))
        if self.config.debug:
            self._scheduler.check()
        return chunks

    def has_work(self) -> bool:
        """Whether a step would do anything: requests are open, steps in flight, or chunks not handed out."""
        return bool(self._live or self._steps or self._unsent)

    def close(self) -> None:
        self._channel.close()

    def pages_and_slots_in_use(self) -> tuple[int, int]:
        slots = self._scheduler.slots
        return slots.pool.num_in_use, slots.num_slots_in_use

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def _chunk(self, row: CommittedRow, result: StepResult) -> TokenChunk:
        live = self._live[row.state.request.request_id]
        if row.bad:
            message = "the model's values for this request are not finite (NaN or infinity); the request was ended"
            return self._end(live, live.output.fail(FinishReason.ERROR, message))
        chunk = live.output.extend(row, result)
        return self._end(live, chunk) if chunk.finish_reason is not None else self._deliver(live, chunk)

    def _end(self, live: _Live, chunk: TokenChunk) -> TokenChunk:
        stats = live.output.stats(
            num_cached_tokens=live.state.num_cached_tokens, num_preemptions=live.state.num_preemptions
        )
        self._scheduler.finish(live.state)
        del self._live[chunk.request_id]
        return self._deliver(live, chunk.with_stats(stats))

    def _deliver(self, live: _Live, chunk: TokenChunk) -> TokenChunk:
        live.stream.push(chunk)
        return chunk

    def _admissible_limit(self, request: GenerateRequest) -> int:
        """Committed length at which the request ends, after every check that it can run at all."""
        prompt, max_len = request.prompt_token_ids, self.sizes.max_model_len
        if not prompt:
            raise ValueError("empty prompt: expected at least one token")
        if len(prompt) >= max_len:
            raise ValueError(
                f"prompt of {len(prompt)} tokens: expected at most {max_len - 1} (max_model_len {max_len} less one to "
                "generate)"
            )
        outside = [t for t in prompt if not (isinstance(t, int) and 0 <= t < self.loaded.vocab_size)]
        if outside:
            most = self.loaded.vocab_size - 1
            raise ValueError(f"prompt has token id {outside[0]!r}: expected an integer in 0..{most}")
        max_tokens = request.sampling.max_tokens
        limit = max_len if max_tokens is None else min(max_len, len(prompt) + max_tokens)
        need, have = -(-limit // self.config.page_size), self.sizes.num_pages - 1
        if need > have:
            raise ValueError(
                f"request of up to {limit} tokens needs {need} KV pages, the pool has {have}: raise num_pages to "
                f"{need + 1} or lower max_tokens"
            )
        return limit

    def _output_text(self, request: GenerateRequest) -> OutputText | None:
        factory = self.loaded.detokenizers
        if factory is None:
            if request.sampling.stop:
                raise ValueError("stop strings need a tokenizer.json beside the model")
            return None
        return OutputText(factory.new(), request.sampling.stop, request.sampling.min_tokens)


class RequestStream(Iterator[TokenChunk]):
    """Chunks of one request, in order; the last has a finish reason. Reading it drives the engine when needed."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self.request_id = request_id
        self._engine = engine
        self._chunks: deque[TokenChunk] = deque()
        self._ended = False

    def push(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)

    def __next__(self) -> TokenChunk:
        while not self._chunks:
            if self._ended:
                raise StopIteration
            self._engine.step()
        chunk = self._chunks.popleft()
        self._ended = chunk.finish_reason is not None
        return chunk


def _scheduler(config: EngineConfig, loaded: LoadedModel, sizes: Sizes) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            max_num_seqs=config.max_num_seqs, max_model_len=sizes.max_model_len, page_size=config.page_size,
            num_pages=sizes.num_pages, prefill_chunk_size=config.prefill_chunk_size, k=config.k,
            lookahead=loaded.drafter.lookahead if loaded.drafter is not None else 0, prefix_cache=config.prefix_cache,
        )
    )


def _executor(config: EngineConfig, loaded: LoadedModel, sizes: Sizes) -> Executor:
    state = DeviceState(
        num_slots=config.max_num_seqs + 1, max_model_len=sizes.max_model_len, page_size=config.page_size,
        vocab_size=loaded.vocab_size, device=loaded.device, debug=config.debug,
        carried_shapes=loaded.drafter.carried_shapes() if loaded.drafter is not None else {},
    )
    return Executor(loaded.model, loaded.drafter, state, sizes.num_pages)
