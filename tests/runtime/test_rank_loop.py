"""How a rank's work between two rings ends when the epoch may be called off: the weights stay or the process goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from runtime.rank_loop import Ending, RankLoop, Served
from runtime.rank_messages import Failure, Ready, Start, Stop, decode_control, encode_control, frame_plans
from runtime.ring import ReaderDead, RingClosed, RingTimeout, WriterDead
from runtime.vitals import RankVitals, page_size

START = encode_control(Start(max_model_len=8, num_pages=2))
STOP = encode_control(Stop())
STEP = frame_plans(4, b"plan")


@dataclass
class Model:
    """`run` is what happens in a step."""

    run_step: Callable[[], None] = lambda: None
    closed: bool = False
    allocated: int = 0

    @property
    def facts(self) -> Mapping[str, int]:
        return {"num_pages": 2}

    def allocate(self, *, max_model_len: int, num_pages: int) -> None:
        self.allocated += 1

    def run(self, plans: memoryview, publish: Callable[[bytes], None]) -> None:
        self.run_step()
        publish(bytes(plans))

    def take_digests(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


@dataclass
class Plans:
    """Gives these messages, or raises them, then nothing any more; `after` is called in every wait for more."""

    messages: list[bytes | Exception]
    after: Callable[[], None] = lambda: None

    def receive(self, timeout_s: float) -> bytes:
        assert timeout_s <= 0.1, "the signal is looked at ten times a second at least"
        if not self.messages:
            self.after()
            raise RingTimeout("nothing")
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message


@dataclass
class Results:
    sent: list[bytes] = field(default_factory=list)
    fault: Exception | None = None

    def send(self, data: bytes, timeout_s: float) -> None:
        if self.fault is not None:
            raise self.fault
        self.sent.append(data)

    def failure(self) -> Failure:
        message = decode_control(self.sent[-1])
        assert isinstance(message, Failure)
        return message


@pytest.fixture
def vitals() -> Iterator[RankVitals]:
    fd = os.memfd_create("lockstep-test-page")
    os.ftruncate(fd, page_size(1))
    page = RankVitals(fd, 0)
    os.close(fd)
    yield page
    page.close()


class Scene:
    def __init__(self, vitals: RankVitals) -> None:
        self.vitals, self.signal, self.results = vitals, SimpleNamespace(is_set=False), Results()

    def live(self, plans: Plans, build: Callable[[], Served]) -> Ending:
        loop = RankLoop(
            plans, self.results, self.vitals, is_leader=True, debug=False, called_off=self.signal
        )
        return loop.live(build)

    def call_off(self) -> None:
        self.signal.is_set = True


@pytest.fixture
def scene(vitals: RankVitals) -> Scene:
    return Scene(vitals)


def test_told_to_stop(scene: Scene) -> None:
    model = Model()
    assert scene.live(Plans([START, STEP, STOP]), lambda: model) is Ending.STOPPED
    assert model.closed
    assert decode_control(scene.results.sent[0]) == Ready(facts={"num_pages": 2})


def test_called_off_while_it_waits(scene: Scene) -> None:
    model = Model()
    assert scene.live(Plans([START, STEP], after=scene.call_off), lambda: model) is Ending.LEFT
    assert not model.closed
    assert len(scene.results.sent) == 2, "nothing has failed"


def test_called_off_inside_a_step_whatever_that_raises(scene: Scene) -> None:
    def step() -> None:
        scene.call_off()
        raise KeyError("because half of it was missing")

    assert scene.live(Plans([START, STEP]), lambda: Model(step)) is Ending.LEFT
    assert len(scene.results.sent) == 1


def test_called_off_with_a_full_ring(scene: Scene) -> None:
    scene.results.fault = RingTimeout("full")
    scene.call_off()
    assert scene.live(Plans([START, STEP]), Model) is Ending.LEFT


def test_called_off_while_it_loads(scene: Scene) -> None:
    def build() -> Served:
        scene.call_off()
        raise RuntimeError("the exchange between ranks was called off")

    assert scene.live(Plans([]), build) is Ending.LEFT


@pytest.mark.parametrize("end", [RingClosed("closed"), WriterDead("relay died")])
def test_the_relay_is_gone(scene: Scene, end: Exception) -> None:
    model = Model()
    assert scene.live(Plans([START, end]), lambda: model) is Ending.LEFT
    assert not model.closed


def test_nobody_takes_results_any_more(scene: Scene) -> None:
    def step() -> None:
        scene.results.fault = ReaderDead("relay died")

    assert scene.live(Plans([START, STEP]), lambda: Model(step)) is Ending.LEFT


def test_another_rank_is_lost(scene: Scene) -> None:
    def step() -> None:
        scene.vitals.waiting(b"all_to_all on ep".ljust(64, b"\0"))
        raise RuntimeError("rank 1 has closed the connection")

    assert scene.live(Plans([START, STEP]), lambda: Model(step)) is Ending.LEFT
    failure = scene.results.failure()
    assert (failure.cause, failure.step_id) == ("communication", 4)


def test_its_own_error_ends_it(scene: Scene) -> None:
    def step() -> None:
        raise KeyError("x")

    assert scene.live(Plans([START, STEP]), lambda: Model(step)) is Ending.FAILED
    assert scene.results.failure().cause == "other"


def test_a_users_mistake_ends_it(scene: Scene) -> None:
    def build() -> Served:
        raise FileNotFoundError("model.safetensors")

    assert scene.live(Plans([]), build) is Ending.FAILED
    assert scene.results.failure().cause == "user"


def test_the_process_is_told_to_exit(scene: Scene) -> None:
    """Not even a call-off lets it stay."""

    def step() -> None:
        scene.call_off()
        raise SystemExit

    assert scene.live(Plans([START, STEP]), lambda: Model(step)) is Ending.FAILED
