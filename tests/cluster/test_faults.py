"""Two faults of each kind under load: no request fails, no token is lost or repeated, nothing is left."""

from __future__ import annotations

import random

import pytest

from launch.exit_codes import EXIT_PEER_LOST
from tests.cluster.controller_loss import lose_controller
from tests.cluster.faults import MUST_BE_ZERO, parse, run
from tests.cluster.injection import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.needs_network])
def test_faults_lose_nothing(kind: str) -> None:
    report = run(parse(["--kind", kind, "--repeats", "2"]), None)
    figures = report.figures()
    assert {name: figures[name] for name in MUST_BE_ZERO} == dict.fromkeys(MUST_BE_ZERO, 0), report.details()
    assert figures["num_undetected"] == (0 if KINDS[kind].restarts else 2), report.details()
    assert KINDS[kind].restarts or not figures["num_restarts"], report.details()
    assert figures["num_requests"] > 0


@pytest.mark.slow
def test_without_their_controller_all_end_with_its_code() -> None:
    loss = lose_controller(random.Random(0))
    assert loss.seconds is not None, loss
    assert loss.exit_codes == {0: EXIT_PEER_LOST, 1: EXIT_PEER_LOST}
    assert loss.orphans == []
