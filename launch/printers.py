"""Where outputs go: JSON lines or streaming text on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from launch.outcome import Outcome
from runtime.request import TokenChunk

if TYPE_CHECKING:
    from runtime.recovery import RecoveryEvent

REFRESH_S = 0.1
_CONTROLS = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


class Printer(Protocol):
    """Told of every change; prints in input order."""

    def update(self, index: int, chunk: TokenChunk | None) -> None:
        """Outcome `index` grew by `chunk` or, with None, was refused."""

    def summary(self, figures: dict[str, Any]) -> None: ...


class JsonPrinter:
    """One object a prompt, each as soon as it and all before it are finished; the summary last."""

    def __init__(self, outcomes: Sequence[Outcome], out: TextIO) -> None:
        self._outcomes, self._out, self._next = outcomes, out, 0

    def update(self, index: int, chunk: TokenChunk | None) -> None:
        while self._next < len(self._outcomes) and self._outcomes[self._next].finished:
            self._write(self._outcomes[self._next].to_json())
            self._next += 1

    def summary(self, figures: dict[str, Any]) -> None:
        self._write({"summary": figures})

    def _write(self, value: dict[str, Any]) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()


class TextPrinter:
    """Streams the first unfinished prompt; the others wait their turn. Headers only where there are several."""

    def __init__(self, outcomes: Sequence[Outcome], out: TextIO) -> None:
        self._outcomes, self._out = outcomes, out
        self._current = -1
        self._terminal = out.isatty()
        self._open_next()

    def update(self, index: int, chunk: TokenChunk | None) -> None:
        if index == self._current and chunk is not None:
            self._write(chunk.text)
        while self._current < len(self._outcomes) and self._outcomes[self._current].finished:
            self._close()
            self._open_next()

    def summary(self, figures: dict[str, Any]) -> None:
        self._write(figures_line(figures) + "\n")

    def _open_next(self) -> None:
        self._current += 1
        if self._current >= len(self._outcomes):
            return
        outcome = self._outcomes[self._current]
        if len(self._outcomes) > 1:
            self._write(f"--- {outcome.row.id} --- {_excerpt(outcome.row.prompt or '')}\n")
        self._write(outcome.text)

    def _close(self) -> None:
        outcome = self._outcomes[self._current]
        if outcome.error is not None:
            self._write(f"[{outcome.error}]")
        self._write("\n" if len(self._outcomes) == 1 else "\n\n")

    def _write(self, text: str) -> None:
        self._out.write(text.translate(_CONTROLS) if self._terminal else text)
        self._out.flush()


class Progress:
    """One line on a terminal, rewritten every REFRESH_S seconds at most; silent elsewhere."""

    def __init__(self, outcomes: Sequence[Outcome], err: TextIO, shown: bool) -> None:
        self._outcomes, self._err = outcomes, err
        self._shown = shown and err.isatty()
        self._start = self._last = time.monotonic()
        self._num_tokens = 0
        self._visible = False

    def update(self, index: int, chunk: TokenChunk | None) -> None:
        self._num_tokens += len(chunk.token_ids) if chunk else 0
        now = time.monotonic()
        if self._shown and now - self._last >= REFRESH_S:
            self._last, self._visible = now, True
            done = sum(o.finished for o in self._outcomes)
            rate = self._num_tokens / (now - self._start)
            self._err.write(f"\r{done}/{len(self._outcomes)} prompts, {self._num_tokens} tokens, {rate:.1f} tokens/s ")
            self._err.flush()

    def clear(self) -> None:
        """Take the line away, before anything else is written to the same terminal."""
        if self._shown and self._visible:
            self._err.write("\r\x1b[K")
            self._err.flush()
            self._visible = False


def figures_line(figures: dict[str, Any]) -> str:
    """tokens, steps, acceptance, tokens per step, tokens/s, time to first token; `-` where there is none."""

    def show(name: str, digits: int) -> str:
        return "-" if figures[name] is None else f"{figures[name]:.{digits}f}"

    return (
        f"{figures['num_tokens']} tokens, {figures['steps']} steps, acceptance {show('acceptance_rate', 3)}, "
        f"{show('tokens_per_step', 2)} tokens/step, {show('tokens_per_s', 1)} tokens/s, "
        f"time to first token {show('ttft_ms', 1)} ms"
    )


def show_figures(
    figures: Mapping[str, Any], as_json: bool, render: Callable[[Mapping[str, Any]], str] | None = None
) -> None:
    """A benchmark's result: one JSON object, or for reading."""
    if as_json:
        text = json.dumps(figures)
    elif render is not None:
        text = render(figures)
    else:
        width = max(len(name) for name in figures)
        text = "\n".join(f"{name:<{width}}  {'-' if value is None else value}" for name, value in figures.items())
    sys.stdout.write(text + "\n")


def complain(message: str) -> None:
    """One line on standard error, whatever the message holds."""
    sys.stderr.write(f"lockstep: error: {' '.join(message.split())}\n")


def report_recovery(event: RecoveryEvent) -> None:
    """One line on standard error for ranks lost or replaced; when they are given up, every request says so."""
    lines = {
        "lost": f"{event.message}; starting again (restart {event.num_restarts})",
        "recovered": f"{event.message} after {event.elapsed_s:.1f} s",
    }
    if event.stage in lines:
        sys.stderr.write(f"lockstep: warning: {' '.join(lines[event.stage].split())}\n")


def _excerpt(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= 80 else line[:77] + "..."
