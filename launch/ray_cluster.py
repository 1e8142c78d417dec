"""`lockstep ray`: a controller and workers as processes of Ray's actors, placed by one placement group a dp group."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from launch.config import load_config
from launch.exit_codes import EXIT_FAILURE, exit_code_of_signal
from launch.ray_launch import ControllerEnded, RayLaunch, RayOptions


def run(options: RayOptions) -> int:
    """The controller's exit code. Raises ValueError where Ray is not here or has no room."""
    config = load_config(options.config, options.overrides)
    ray = _import_ray()
    with _connected(ray, options):
        launch = RayLaunch(ray, config, options)
        try:
            launch.place()
            with _signals_to(launch):
                launch.start()
                return _exit_code(launch.follow())
        except ControllerEnded as ended:
            return _exit_code(ended.code)
        finally:
            launch.end()


@contextmanager
def _connected(ray: Any, options: RayOptions) -> Iterator[None]:
    """Joined to a Ray cluster, or to one that lives as long as this."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if not ray.is_initialized():
        ray.init(
            address=options.address, log_to_driver=False, logging_level="warning", include_dashboard=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _signals_to(launch: RayLaunch) -> Iterator[None]:
    def forward(number: int, _frame: FrameType | None) -> None:
        launch.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ValueError(f"lockstep ray needs Ray: pip install 'lockstep[ray]' ({error})") from None
    return ray


def _exit_code(code: int | None) -> int:
    """As a shell tells it: 128 + n for signal n."""
    if code is None:
        return EXIT_FAILURE
    return exit_code_of_signal(-code) if code < 0 else code
