"""`lockstep generate`: prompts in, text or JSON lines out, through one engine and its ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from launch.config import LaunchConfig, load_config
from launch.outcome import Outcome, summarise
from launch.placement_report import with_placement_report
from launch.printers import JsonPrinter, Printer, Progress, TextPrinter, complain, report_recovery
from launch.prompts import PromptRow, merge_sampling, model_sampling, read_prompts
from runtime.request import FinishReason, GenerateRequest, TokenChunk
from runtime.serve.tokenizer import encode_prompt, load_tokenizer

if TYPE_CHECKING:
    from runtime.config import EngineConfig
    from runtime.engine import Engine
    from runtime.recovery import RestartLimits

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The command line of `lockstep generate`; `flags` are the sampling fields given on it."""

    prompts: Sequence[str] = ()
    prompts_file: str | None = None
    config: Path | None = None
    overrides: Sequence[str] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    json: bool = False
    trace: Path | None = None


class EngineLike(Protocol):
    """What this command needs of an engine."""

    def submit(self, request: GenerateRequest) -> object: ...

    def step(self) -> Sequence[TokenChunk]: ...

    def has_work(self) -> bool: ...

    def close(self) -> None: ...


def run(options: GenerateOptions, make: Callable[[EngineConfig], EngineLike] | None = None) -> int:
    """Generate for every prompt; the exit code. Raises ValueError or OSError, in one line, for the user's mistakes."""
    merge_sampling([options.flags])  # a wrong flag is refused before anything is loaded
    config = load_config(options.config, options.overrides)
    engine_config = config.engine_config()
    outcomes, requests = prepare(options, config)
    start = time.perf_counter()
    engine = make(engine_config) if make is not None else make_engine(engine_config, config.cluster.local_restarts())
    try:
        load_s = time.perf_counter() - start
        with traced(engine, options.trace):
            return _drive(engine, outcomes, requests, options.json, load_s)
    finally:
        engine.close()


@contextmanager
def traced(engine: object, path: Path | None) -> Iterator[None]:
    """Write what controller and ranks do in here to `path`; None: nothing of the kind. Raises OSError if it cannot."""
    if path is None:
        yield
        return
    from launch.trace_file import start_trace, write_trace
    from runtime.engine import Engine

    assert isinstance(engine, Engine)
    path.open("w").close()  # what cannot be written is better told before the work than after it
    start_trace(engine)
    try:
        yield
    finally:
        sys.stderr.write(f"lockstep: trace: {write_trace(engine, path)}\n")


def prepare(options: GenerateOptions, config: LaunchConfig) -> tuple[list[Outcome], dict[str, GenerateRequest]]:
    """One outcome a prompt, already refused where the row is at fault, and the requests of the others.

    Requests are keyed by request id, which is the prompt's index: `id` need not be unique.
    """
    outcomes = [_outcome(row) for row in _rows(options, config)]
    return outcomes, _requests(outcomes, options.flags, config)


def make_engine(config: EngineConfig, restarts: RestartLimits | None = None) -> Engine:
    """The engine of this process, with as many rank processes as the layout has ranks; one rank needs none.

    `restarts`: how often rank processes that failed are started again; None: never.
    """
    from runtime.engine import Engine

    if config.layout.ep == 1:
        return Engine(config)
    from launch.deployment import start

    engine = Engine(config, deployment=start(config, restarts=restarts), on_event=report_recovery)
    with_placement_report(engine)
    return engine if config.shares_memory else with_split_threshold(engine)


def with_split_threshold(engine: Engine) -> Engine:
    """The same engine, which knows from how many tokens on a step is best run as two halves if that was left open."""
    from runtime.split_calibration import calibrate_split

    balancer = engine.balancer
    if balancer is not None:
        balancer.is_resting = True
    line = calibrate_split(engine)
    if balancer is not None:
        balancer.is_resting = False
    if line is not None:
        sys.stderr.write(f"lockstep: split: {line}\n")
        if balancer is not None:
            balancer.forget_loads(engine.channel)
    return engine


def _rows(options: GenerateOptions, config: LaunchConfig) -> list[PromptRow]:
    given = [PromptRow(id=str(i), prompt=prompt) for i, prompt in enumerate(options.prompts)]
    if options.prompts_file is not None:
        given += read_prompts(options.prompts_file, len(given))
    if not given and options.prompts_file is None:
        given = [PromptRow(id=str(i), prompt=prompt) for i, prompt in enumerate(config.generate.prompts)]
    if not given:
        where = options.prompts_file or "generate.prompts of the configuration"
        raise ValueError(f"no prompt: none on the command line and none in {where}")
    return given


def _outcome(row: PromptRow) -> Outcome:
    outcome = Outcome(row=row)
    if row.error is not None:
        outcome.refuse(row.error)
    elif not row.prompt:
        outcome.refuse("empty prompt")
    return outcome


def _requests(
    outcomes: Sequence[Outcome], flags: Mapping[str, Any], config: LaunchConfig
) -> dict[str, GenerateRequest]:
    model = Path(config.model.path)
    tokenizer = load_tokenizer(model)
    below = [model_sampling(model), config.generate.sampling()]
    requests = {}
    for index, outcome in enumerate(outcomes):
        if outcome.finished:
            continue
        try:
            ids = encode_prompt(tokenizer, outcome.row.prompt or "")
            sampling = merge_sampling([*below, outcome.row.sampling, flags])
        except ValueError as error:
            outcome.refuse(str(error))
            continue
        outcome.num_prompt_tokens = len(ids)
        requests[str(index)] = GenerateRequest(request_id=str(index), prompt_token_ids=ids, sampling=sampling)
    return requests


def _drive(
    engine: EngineLike, outcomes: list[Outcome], requests: dict[str, GenerateRequest], as_json: bool, load_s: float
) -> int:
    printer: Printer = (JsonPrinter if as_json else TextPrinter)(outcomes, sys.stdout)
    progress = Progress(outcomes, sys.stderr, shown=as_json or not sys.stdout.isatty())
    start = time.perf_counter()
    for index, outcome in enumerate(outcomes):
        if not outcome.finished:
            _submit(engine, outcome, requests[str(index)])
        if outcome.finished:
            complain(f"prompt {outcome.row.id}: {outcome.error}")
            printer.update(index, None)
    while engine.has_work():
        for chunk in _step(engine):
            index = int(chunk.request_id)
            outcomes[index].add(chunk)
            if outcomes[index].finished:
                progress.clear()
            printer.update(index, chunk)
            progress.update(index, chunk)
            if outcomes[index].error is not None:
                complain(f"prompt {outcomes[index].row.id}: {outcomes[index].error}")
    progress.clear()
    printer.summary(summarise(outcomes, time.perf_counter() - start, load_s))
    return _exit_code(outcomes)


def _submit(engine: EngineLike, outcome: Outcome, request: GenerateRequest) -> None:
    try:
        engine.submit(request)
    except ValueError as error:  # over a limit of this model or deployment
        outcome.refuse(str(error))


def _step(engine: EngineLike) -> Sequence[TokenChunk]:
    try:
        return engine.step()
    except ValueError as error:  # past submission nothing is the user's mistake any more
        raise RuntimeError(f"the engine failed: {error}") from error


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    failed = [o for o in outcomes if o.finish_reason is FinishReason.ERROR]
    if any(not o.user_error for o in failed):
        return EXIT_FAILURE
    return EXIT_USAGE if failed else EXIT_OK
