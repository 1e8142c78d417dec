"""The `lockstep` command. Importing it costs little: what a subcommand needs is imported when it runs."""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch import launch_commands

if TYPE_CHECKING:
    from launch.generate import GenerateOptions

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def _dashes(name: str) -> str:
    """`--max_tokens` is `--max-tokens`."""
    return name.replace("_", "-")


app = typer.Typer(
    name="lockstep",
    help="A distributed inference runtime for Mixture-of-Experts models with exact speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _dashes, "help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    help="Measure planning, decoding, and what speculation rests on.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench, name="bench")
launch_commands.register(app)

Config = Annotated[Path | None, typer.Option("--config", help="TOML file; the built-in demo if left out.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated.")
]
DraftTokens = Annotated[int | None, typer.Option(help="Draft tokens a step, 0 for plain decoding.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the CPU back end.")]
TensorParallel = Annotated[int | None, typer.Option("--tp", help="Ranks that share each attention group.")]
DataParallel = Annotated[int | None, typer.Option("--dp", help="Attention groups, each with its own requests.")]
Split = Annotated[
    bool | None, typer.Option("--split/--no-split", help="Run each step as two halves; by its size if left out.")
]
PromptsFile = Annotated[
    str | None,
    typer.Option("--prompts", metavar="FILE.jsonl", help="One object a line: prompt, id, sampling fields; - is stdin."),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE.json", help="Write what every rank and half does in each step (Perfetto)."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output and nothing else.")]


def _version(shown: bool) -> None:
    if shown:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"lockstep {version('lockstep')}")
        except PackageNotFoundError:
            typer.echo("lockstep (run from a checkout, not installed)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where a failure came from.")] = False,
) -> None: ...


@app.command()
def generate(
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts; those of the configuration if none.")] = None,
    prompts: PromptsFile = None,
    config: Config = None,
    overrides: Overrides = None,
    draft_tokens: DraftTokens = None,
    tp: TensorParallel = None,
    dp: DataParallel = None,
    split: Split = None,
    max_tokens: Annotated[int | None, typer.Option(help="Output tokens at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(help="0 turns it off.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same ids for any batch and any number of drafts.")] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos/--no-ignore-eos")] = None,
    json: Json = False,
    trace: Trace = None,
    max_restarts: Annotated[
        int | None, typer.Option(help="Start failed ranks again, so many times in ten minutes; never if left out.")
    ] = None,
) -> int:
    """Continue prompts. A flag overrides a prompt's row, a row the configuration, that the model's own defaults.

    Exit code 0; 2 if a prompt, flag or file was at fault (the other prompts are still continued); 1 for failures.
    """
    from launch.generate import run

    return run(_generate_options(
        prompt=prompt, prompts=prompts, config=config, overrides=overrides, draft_tokens=draft_tokens, tp=tp, dp=dp,
        split=split, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        ignore_eos=ignore_eos, json=json, trace=trace, max_restarts=max_restarts,
    ))


_SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "draft_tokens")


def _generate_options(*, max_restarts: int | None = None, **given: Any) -> GenerateOptions:
    """The options of `generate` by the names of its parameters."""
    from launch.generate import GenerateOptions

    restarts = [] if max_restarts is None else [f"cluster.max_restarts={max_restarts}"]
    layout = _layout_overrides(given["tp"], given["dp"], given["split"])
    return GenerateOptions(
        prompts=given["prompt"] or [],
        prompts_file=given["prompts"],
        config=given["config"],
        overrides=[*_overrides(given["overrides"], given["draft_tokens"]), *layout, *restarts],
        flags={name: given[name] for name in _SAMPLING_FLAGS if given[name] is not None},
        json=given["json"],
        trace=given["trace"],
    )


def _like_generate(command: Callable[..., int]) -> Callable[..., int]:
    """A command with the options of `generate` beside its own; it gets them by name in `shared`."""
    own, shared = inspect.signature(command, eval_str=True), inspect.signature(generate, eval_str=True)
    named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters = [p for name, p in shared.parameters.items() if name != "max_restarts"] + named

    @functools.wraps(command)
    def wrapped(**values: Any) -> int:
        return command(**values)

    wrapped.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {**generate.__annotations__, **command.__annotations__}
    return wrapped


@app.command()
@_like_generate
def controller(
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="In the place of cluster.bind; port 0 takes a free one.")
    ] = None,
    address_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write HOST:PORT here, for `--controller` of workers.")
    ] = None,
    **shared: Any,
) -> int:
    """Continue prompts as `generate` does, over ranks on several hosts: start this first, then a worker for each rank.

    Workers are `python -m launch.worker --config F --controller ADDRESS`, started by torchrun, Slurm or Ray. All exit
    with the code of this command: 69 when ranks were lost for good, 70 when one failed at the start, 78 when they
    disagree, else as `generate`.
    """
    from launch.controller_command import ControllerOptions, run

    return run(_generate_options(**shared), ControllerOptions(listen=listen, address_file=address_file))


@bench.command("schedule")
def bench_schedule(
    requests: Annotated[int, typer.Option(help="Running requests.")] = 256,
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens a step.")] = 1,
    prompt_len: Annotated[int, typer.Option(help="Committed tokens of each request at the start.")] = 64,
    steps: Annotated[int, typer.Option(help="Decode steps measured.")] = 200,
    json: Json = False,
) -> int:
    """Time of planning one decode step and of encoding its plan, without a model."""
    from launch.bench_schedule import measure
    from launch.printers import show_figures

    show_figures(measure(num_requests=requests, k=draft_tokens, prompt_len=prompt_len, num_steps=steps), json)
    return 0


@bench.command("decode")
def bench_decode(
    config: Config = None,
    overrides: Overrides = None,
    batch: Annotated[int, typer.Option(help="Requests at once.")] = 1,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens of each.")] = 32,
    output_len: Annotated[int, typer.Option(help="Output tokens of each.")] = 128,
    draft_tokens: DraftTokens = None,
    threads: Threads = None,
    tp: TensorParallel = None,
    dp: DataParallel = None,
    split: Split = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="random, repeat (8 ids in a loop) or succ (each one more than the last).")
    ] = "random",
    repeat: Annotated[int, typer.Option(help="Runs; the median counts.")] = 3,
    json: Json = False,
) -> int:
    """Prefill and decode throughput: B P / T(1) and B (N - 1) / (T(N) - T(1)); greedy, EOS ignored, no prefix reuse."""
    from launch.bench_decode import DecodeOptions, measure
    from launch.config import load_config
    from launch.printers import show_figures

    options = DecodeOptions(batch=batch, prompt_len=prompt_len, output_len=output_len, prompts=prompts, repeat=repeat)
    given = [*_overrides(overrides, draft_tokens, threads), *_layout_overrides(tp, dp, split)]
    show_figures(measure(load_config(config, given).engine_config(), options), json)
    return 0


@bench.command("verify")
def bench_verify(
    prompts: PromptsFile = None,
    config: Config = None,
    overrides: Overrides = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Draft tokens a step while acceptance is measured; 3, or 0 without an MTP layer.")
    ] = None,
    threads: Threads = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens a prompt while acceptance is measured.")] = 64,
    context: Annotated[int, typer.Option(help="Committed tokens in front of the timed passes.")] = 128,
    json: Json = False,
) -> int:
    """What speculation rests on, on your model and prompts: pass time against tokens, share of accepted drafts."""
    from launch.bench_verify import VerifyOptions, measure, render
    from launch.config import load_config
    from launch.printers import show_figures

    loaded = load_config(config, _overrides(overrides, None, threads))
    options = VerifyOptions(prompts_file=prompts, draft_tokens=draft_tokens, max_tokens=max_tokens, context=context)
    show_figures(measure(loaded, options), json, render)
    return 0


@bench.command("channel")
def bench_channel(
    readers: Annotated[int, typer.Option(help="Reader processes.")] = 2,
    bytes: Annotated[int, typer.Option("--bytes", help="Bytes of each message.")] = 65536,
    messages: Annotated[int, typer.Option(help="Messages measured.")] = 2000,
    interval_us: Annotated[int, typer.Option(help="Rest between messages; from 100 on the readers sleep.")] = 0,
    json: Json = False,
) -> int:
    """Time of one message through the shared-memory ring to all readers, as its writer sees it."""
    from launch.bench_channel import measure
    from launch.printers import show_figures

    figures = measure(num_readers=readers, num_bytes=bytes, num_messages=messages, interval_us=interval_us)
    show_figures(figures, json)
    return 0


def _overrides(given: Sequence[str] | None, draft_tokens: int | None, threads: int | None = None) -> list[str]:
    """`--set` values and the flags that are short for one."""
    short = {"draft.tokens": draft_tokens, "engine.threads": threads}
    return [*(given or ()), *(f"{key}={value}" for key, value in short.items() if value is not None)]


def _layout_overrides(tp: int | None, dp: int | None, split: bool | None) -> list[str]:
    """The same for the flags that lay out ranks."""
    halves = None if split is None else "on" if split else "off"
    short = {"parallel.tp": tp, "parallel.dp": dp, "parallel.split": halves}
    return [f"{key}={value}" for key, value in short.items() if value is not None]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0, 2 for the user's mistakes, 1 for failures, one line on stderr for either."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks must not end everybody's run
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run_command(sys.argv[1:] if args is None else args))


def run_command(args: Sequence[str]) -> int:
    """The exit code of one command line. A traceback appears only for failures, and only with `--traceback`."""
    try:
        result: Any = app(list(args), standalone_mode=False, prog_name="lockstep")
    except typer.TyperException as error:
        message = error.format_message()
        if message.startswith("Usage: "):  # no command was given: what is raised then is the help
            sys.stderr.write(message + "\n")
            return error.exit_code
        return _complain(message, error.exit_code)
    except (ValueError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        return _complain(str(error), EXIT_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of our output left: nobody to tell, and nothing more to flush at exit
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return EXIT_FAILURE
    except Exception as error:  # noqa: BLE001  (the last resort: anything else is a failure, told in one line)
        if "--traceback" in args:
            traceback.print_exc()
        return _complain(f"{type(error).__name__}: {error} (`lockstep --traceback ...` shows where)", EXIT_FAILURE)
    return result if isinstance(result, int) else 0


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"lockstep: error: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    main()
