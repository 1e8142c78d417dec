"""The engine: admit, schedule, publish, run, commit, send. `step()` is the whole loop; read it first."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from parallel.trace import Recorder
from runtime.channel import Channel, LocalChannel, RankFailure, Traceable
from runtime.config import EngineConfig
from runtime.loading import LoadedModel, ModelFacts, load_model
from runtime.output import OutputState
from runtime.placement_round import Rebalanced
from runtime.plan import StepResult
from runtime.rank import build_executor
from runtime.recovery import OnEvent, Recover, Recovery, RestartLimits
from runtime.replacement import ExpertBalancer
from runtime.request import FinishReason, GenerateRequest, TokenChunk
from runtime.request_state import RequestState
from runtime.sampling_params import check_vocabulary, encode_params
from runtime.scheduler import CommittedRow, SchedulerLimits
from runtime.serve.detokenizer import OutputText
from runtime.sizing import Sizes, choose_sizes
from runtime.step_planner import StepPlanner


@dataclass(frozen=True, kw_only=True)
class _Live:
    state: RequestState
    output: OutputState
    stream: RequestStream


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The ranks of an engine: what they serve, what fits into each of them, and the way to them.

    `recover` (None: there is no way) is called when `channel`, or one that `recover` gave, has failed. It ends or keeps
    the old ranks, whatever state they are in, and returns a channel to ranks of the same sizes that hold no request. It
    raises RankFailure when it did not work out, CannotRecover when it never will, ValueError for
    what the user has to mend; nothing of it is left running then.
    """

    facts: ModelFacts
    sizes: Sizes
    channel: Channel
    bytes_read: tuple[int, ...]  # of weights, by each rank
    ranks_per_node: int | None = None  # where nodes have equally many, else None
    recover: Recover | None = None
    restarts: RestartLimits = RestartLimits()


class Engine:
    """Continuous batching over one model. Single-threaded: whoever reads a stream drives the steps."""

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel | None = None, *, deployment: Deployment | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        """One rank in this process, of `loaded` or of the model that `config` names, or the ranks of `deployment`.

        `on_event` is told of ranks lost and replaced; it may call `abort`.
        """
        self.config = config
        if deployment is None:
            deployment = _alone(config, loaded if loaded is not None else load_model(config))
        self.bytes_read = deployment.bytes_read
        self.facts, self.sizes, self._channel = deployment.facts, deployment.sizes, deployment.channel
        per_node = config.ranks_per_node or deployment.ranks_per_node or config.layout.ep
        self._balancer = ExpertBalancer(config, self._channel, per_node) if config.places_experts else None
        recover = deployment.recover
        if recover is not None and self._balancer is not None:
            recover = self._balancer.restoring(recover)
        self._recovery = Recovery(recover, deployment.restarts, on_event=on_event)
        self._planner = StepPlanner(config, _limits(config, self.facts, self.sizes))
        self._depth = 1 if config.plans_ahead else 0  # steps in flight while the next one is planned
        self._num_in_flight = 0
        self._live: dict[str, _Live] = {}
        self._unsent: list[TokenChunk] = []
        self._seeds = random.SystemRandom()
        self.trace = Recorder()  # what this process does with a step; the channel knows what the ranks do

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Queue a request. Raises ValueError, and changes nothing, when it can never run."""
        if request.request_id in self._live:
            raise ValueError(f"request_id {request.request_id!r} is already running")
        limit = self._admissible_limit(request)
        check_vocabulary(request.sampling, self.facts.vocab_size)
        eos = self.facts.eos_token_ids
        text = self._output_text(request)
        params = encode_params(
            request.sampling, prompt_len=len(request.prompt_token_ids),
            default_seed=self._seeds.getrandbits(63), eos_token_ids=eos,
        )
        state = self._planner.add(request, limit=limit, params=params)
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

        Lost ranks are replaced within this call where the deployment can. Raises what a step raised, every time from
        then on.
        """
        results = None
        try:
            self._channel.raise_failure()
            if self._balancer is not None:
                self._balancer.turn(self._channel)
            self.trace.phase("planning")
            plans = self._planner.schedule()
            if plans is not None:
                self.trace.step = plans[0].step_id
                self.trace.phase("sending the plan")
                self._channel.send(plans)
                self._num_in_flight += 1
            if self._num_in_flight and (plans is None or self._num_in_flight > self._depth):
                self._num_in_flight -= 1
                self.trace.phase("waiting for results")
                results = self._channel.receive()
        except RankFailure as failure:
            return self._renew(failure)
        self.trace.phase("committing")
        chunks = self._take_unsent()
        if results is not None:
            chunks += [self._chunk(row, result) for row, result in self._planner.commit(results)]
        if self.config.debug:
            self._planner.check()
        self.trace.phase("between steps")
        return chunks

    def has_work(self) -> bool:
        """Whether a step would do anything: requests are open, steps in flight, or chunks not handed out."""
        return bool(self._live or self._num_in_flight or self._unsent)

    def close(self) -> None:
        self._channel.close()

    def pages_and_slots_in_use(self) -> tuple[int, int]:
        return self._planner.pages_and_slots_in_use()

    def rebalance(self, *, wait: bool = True) -> Rebalanced | None:
        """Place experts anew by what they were asked for so far; ids and logits stay the same. With `wait` all ranks
        have changed over when it returns, and it says what that came to; else that happens between later steps.

        Raises ValueError where experts have fixed places, or where ranks could not get ready: nothing has changed then.
        """
        if self._balancer is None:
            raise ValueError("experts have fixed places: set parallel.rebalance_steps to 0 or more")
        return self._balancer.rebalance(self._channel, wait=wait)

    @property
    def balancer(self) -> ExpertBalancer | None:
        """Where experts are, and what the last re-placement came to; None where they have fixed places."""
        return self._balancer

    @property
    def planner(self) -> StepPlanner:
        return self._planner

    @property
    def channel(self) -> Channel:
        return self._channel

    def _renew(self, failure: RankFailure) -> list[TokenChunk]:
        """Go on with new ranks: open requests wait again with the tokens they have. Where there are none, they end."""
        self._num_in_flight = 0
        self._planner.restart()
        if self._unsent:  # they need no rank, and to find new ones takes long; the next step hears of the failure again
            return self._take_unsent()
        try:
            self._channel = self._recovery.renew(failure)
            if self.trace.on and isinstance(self._channel, Traceable):
                with suppress(RankFailure):  # lost again already: the next step hears of it
                    self._channel.start_trace()
        except RankFailure as final:
            if not self._live and not self._unsent:
                raise
            return self._fail_all(str(final))
        return self._take_unsent()

    def _take_unsent(self) -> list[TokenChunk]:
        chunks, self._unsent = self._unsent, []
        return chunks

    def _fail_all(self, message: str) -> list[TokenChunk]:
        """End every open request with what befell the ranks."""
        chunks = self._take_unsent()
        for live in list(self._live.values()):
            chunks.append(self._end(live, live.output.fail(FinishReason.ERROR, message)))
        return chunks

    def _chunk(self, row: CommittedRow, result: StepResult) -> TokenChunk:
        live = self._live[row.state.request.request_id]
        if row.bad:
            message = "the model's values for this request are not finite (NaN or infinity); the request was ended"
            return self._end(live, live.output.fail(FinishReason.ERROR, message))
        chunk = live.output.extend(row, result)
        return self._end(live, chunk) if chunk.finish_reason is not None else self._deliver(live, chunk)

    def _end(self, live: _Live, chunk: TokenChunk) -> TokenChunk:
        stats = live.output.stats(
            num_cached_tokens=live.state.num_cached_tokens, num_preemptions=live.state.num_preemptions,
            num_restarts=live.state.num_restarts,
        )
        self._planner.finish(live.state)
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
        outside = [t for t in prompt if not (isinstance(t, int) and 0 <= t < self.facts.vocab_size)]
        if outside:
            most = self.facts.vocab_size - 1
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
        factory = self.facts.detokenizers
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


def _alone(config: EngineConfig, loaded: LoadedModel) -> Deployment:
    """The only rank, in this process."""
    if config.layout.ep > 1:
        raise ValueError(f"dp = {config.dp}, tp = {config.tp}: an engine in one process runs one rank")
    sizes = choose_sizes(config, loaded.facts)
    channel = LocalChannel(
        build_executor(config, loaded, sizes, phase=loaded.trace.phase), threads=config.threads,
        inline=not config.plans_ahead, through_codec=config.debug, trace=loaded.trace,
    )
    return Deployment(facts=loaded.facts, sizes=sizes, channel=channel, bytes_read=(loaded.bytes_read,))


def _limits(config: EngineConfig, facts: ModelFacts, sizes: Sizes) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs, max_model_len=sizes.max_model_len, page_size=config.page_size,
        num_pages=sizes.num_pages, prefill_chunk_size=config.prefill_chunk_size, k=config.k,
        lookahead=facts.lookahead, prefix_cache=config.prefix_cache, max_step_tokens=config.capacity * config.tp,
    )
