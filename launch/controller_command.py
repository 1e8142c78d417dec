"""`lockstep controller`: what `lockstep generate` does, over workers on several hosts that report to this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from launch import generate
from launch.config import load_config
from launch.exit_codes import EXIT_ENGINE, EXIT_INTERRUPTED, EXIT_OK, exit_code_of_signal
from launch.generate import GenerateOptions
from launch.placement_report import with_placement_report
from launch.printers import report_recovery

if TYPE_CHECKING:
    from launch.controller import Controller
    from runtime.config import EngineConfig
    from runtime.engine import Deployment, Engine


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """`listen`: HOST:PORT in the place of `cluster.bind`; `address_file`: where workers find it."""

    listen: str | None = None
    address_file: Path | None = None


class _Terminated(BaseException):
    """SIGTERM has come."""


def run(options: GenerateOptions, own: ControllerOptions) -> int:
    """The exit code, which workers exit with, too. Raises ValueError or OSError for the user's mistakes."""
    from runtime.channel import RankFailure

    session = _Session(options, own)
    try:
        with _terminable(session):
            code = generate.run(options, session.make)
    except (ValueError, RankFailure) as error:
        if not session.told:  # a mistake from before there was anything to tell workers of
            raise
        sys.stderr.write(f"lockstep: error: {error}\n")  # a table of differences has several lines
        return session.told
    except _Terminated:
        sys.stderr.write("lockstep: error: ended by SIGTERM\n")
        return exit_code_of_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        sys.stderr.write("lockstep: error: interrupted\n")
        return EXIT_INTERRUPTED
    finally:
        session.close()
    return session.told or code


class _Session:
    """The controller of one run."""

    def __init__(self, options: GenerateOptions, own: ControllerOptions) -> None:
        self._options, self._own = options, own
        self._controller: Controller | None = None

    @property
    def told(self) -> int:
        """The exit code that workers were told, 0 while all is well."""
        return self._controller.told if self._controller is not None else EXIT_OK

    def make(self, engine_config: EngineConfig) -> Engine:
        """Listen, say where, and wait for the workers."""
        from launch.controller import Controller
        from launch.startup_view import StartupView
        from runtime.engine import Engine

        config = load_config(self._options.config, self._options.overrides)
        controller = self._controller = Controller(config, engine_config, listen=self._own.listen)
        if self._own.address_file is not None:
            controller.write_address(self._own.address_file)
        sys.stderr.write(f"lockstep: controller at {controller.address}, waiting for {engine_config.layout.ep} ranks\n")
        view = StartupView(engine_config.layout.ep, sys.stderr)
        try:
            deployment = controller.deploy(watcher=view)
            view.ready()
        finally:
            view.close()
        engine = with_placement_report(Engine(engine_config, deployment=deployment, on_event=report_recovery))
        return generate.with_split_threshold(engine) if has_network(engine_config, deployment) else engine

    def interrupt(self, code: int, text: str) -> None:
        """Whatever ends this run from now on, workers are told this."""
        if self._controller is not None:
            self._controller.interrupt(code, text)

    def close(self) -> None:
        if self._controller is not None:
            self._controller.close(EXIT_ENGINE, "the controller has failed")


def has_network(config: EngineConfig, deployment: Deployment) -> bool:
    """Whether there is one between ranks; those of a single node share memory if they may."""
    return not config.shares_memory or deployment.ranks_per_node != config.layout.ep


@contextmanager
def _terminable(session: _Session) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the run in order: workers are told."""

    def terminate(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        session.interrupt(exit_code_of_signal(number), f"the controller was ended by {name}")
        raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt

    before = {number: signal.signal(number, terminate) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
