"""The plan's codec: what goes in comes out, and damaged bytes are refused by a ValueError that names what is wrong."""

from __future__ import annotations

import struct
import zlib
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.plan import MAGIC, VERSION, PlanArrays, StepPlan, decode, decode_section, encode, encode_step
from runtime.sampling_params import NEUTRAL, PARAM_DTYPE

SCALARS = struct.Struct("<4sHHqiiiiiiiI4x")
HEADER_SIZE = SCALARS.size + 4
NAMES = [field.name for field in fields(PlanArrays)]
ROW_ARRAYS = ("slots", "num_tokens", "starts", "kv_bounds", "samples", "carries")


def _int32(draw: st.DrawFn, count: int) -> np.ndarray:
    values = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=count, max_size=count))
    return np.array(values, np.int32)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows, grants, freed, new = (draw(st.integers(0, 5)) for _ in range(4))
    lengths = draw(st.lists(st.integers(1, 6), min_size=new, max_size=new))
    num_bias, num_masked = draw(st.integers(0, 3)) * bool(new), draw(st.integers(0, 3)) * bool(new)
    params = np.repeat(NEUTRAL, new)
    if new:
        params["num_bias"][0], params["num_masked"][-1] = num_bias, num_masked
    sizes = dict.fromkeys(ROW_ARRAYS, rows) | dict.fromkeys(("page_slots", "page_index", "pages"), grants)
    sizes |= {"freed_slots": freed, "new_slots": new, "new_limits": new, "new_tokens": sum(lengths)}
    sizes |= {"new_bias_ids": num_bias, "new_masked_ids": num_masked}
    arrays = {name: _int32(draw, size) for name, size in sizes.items()}
    floats = draw(st.lists(st.floats(width=32), min_size=num_bias, max_size=num_bias))
    k = draw(st.integers(0, 16))
    return StepPlan(
        step_id=draw(st.integers(-(2**63), 2**63 - 1)), k=k, num_verify=draw(st.integers(0, rows)),
        num_logprobs=draw(st.integers(-1, 20)), split=draw(st.booleans()),
        arrays=PlanArrays(
            new_cu_tokens=np.cumsum([0, *lengths], dtype=np.int32), new_bias_values=np.array(floats, np.float32),
            new_params=np.frombuffer(params.tobytes(), np.uint8), **arrays,
        ),
        capacities=draw(st.none() | st.tuples(*(st.integers(0, 2**31 - 1),) * 3)),
    )


def assert_equal(a: StepPlan, b: StepPlan) -> None:
    for name in ("step_id", "k", "num_verify", "num_logprobs", "split", "capacities"):
        assert getattr(a, name) == getattr(b, name)
    for name in NAMES:
        left, right = getattr(a.arrays, name), getattr(b.arrays, name)
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(plans())
def test_round_trip(plan: StepPlan) -> None:
    data = encode(plan)
    assert len(data) % 8 == 0
    assert_equal(decode(data), plan)
    assert_equal(decode(memoryview(bytearray(data))), plan)
    assert encode(decode(data)) == data


@settings(max_examples=200, deadline=None, derandomize=True)
@given(plan=plans(), data=st.data())
def test_damage_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    """One to four changed bytes, anywhere."""
    raw = bytearray(encode(plan))
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=4, unique=True)):
        raw[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="plan"):
        decode(bytes(raw))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(plan=plans(), data=st.data())
def test_a_wrong_length_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    raw = encode(plan)
    cut = data.draw(st.integers(0, len(raw) - 1))
    for damaged in (raw[:cut], raw + raw[: 1 + cut]):
        with pytest.raises(ValueError, match="plan"):
            decode(damaged)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=200))
def test_noise_is_refused(raw: bytes) -> None:
    for data in (raw, MAGIC + raw, seal(raw)):
        with pytest.raises(ValueError, match="plan"):
            decode(data)


def seal(
    body: bytes, *, version: int = VERSION, count: int = len(NAMES), flags: int = 0, k: int = 1, num_verify: int = 0
) -> bytes:
    """A header whose size and checksum fit `body`, so that only the contents can be wrong."""
    scalars = SCALARS.pack(MAGIC, version, flags, 7, k, num_verify, -1, 0, 0, 0, count, len(body))
    return scalars + struct.pack("<I", zlib.crc32(scalars + body)) + body


def small_plan() -> StepPlan:
    e = np.zeros(0, np.int32)
    rows = {name: np.array([3, 4], np.int32) for name in ROW_ARRAYS}
    params = np.repeat(NEUTRAL, 1)
    params["num_bias"], params["num_masked"] = 2, 1
    return StepPlan(
        step_id=7, k=1, num_verify=1, num_logprobs=-1, split=False,
        arrays=PlanArrays(
            page_slots=np.array([3], np.int32), page_index=np.array([0], np.int32), pages=np.array([9], np.int32),
            freed_slots=e, new_slots=np.array([4], np.int32), new_limits=np.array([20], np.int32),
            new_cu_tokens=np.array([0, 5], np.int32), new_tokens=np.arange(5, dtype=np.int32),
            new_params=np.frombuffer(params.tobytes(), np.uint8), new_bias_ids=np.array([1, 2], np.int32),
            new_bias_values=np.array([0.5, -1.0], np.float32), new_masked_ids=np.array([6], np.int32), **rows,
        ),
    )


def test_the_small_plan_is_sound() -> None:
    assert_equal(decode(encode(small_plan())), small_plan())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [-1, -(2**31), 2**31 - 1, 1000])
def test_a_length_that_does_not_fit_names_its_array(name: str, length: int) -> None:
    body = bytearray(encode(small_plan())[HEADER_SIZE :])
    struct.pack_into("<i", body, 4 * NAMES.index(name), length)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        decode(seal(bytes(body), num_verify=1))


@pytest.mark.parametrize("name", NAMES)
def test_arrays_that_contradict_each_other_are_named(name: str) -> None:
    """One entry too many, with everything else sound: no array may be longer than its partners say."""
    plan = small_plan()
    array = getattr(plan.arrays, name)
    longer = np.concatenate((array, array[-1:] if len(array) else np.zeros(1, array.dtype)))
    changed = PlanArrays(**{n: getattr(plan.arrays, n) for n in NAMES} | {name: longer})
    raw = encode(StepPlan(step_id=7, k=1, num_verify=1, num_logprobs=-1, split=False, arrays=changed))
    if name == "freed_slots":  # stands alone
        assert decode(raw).arrays.freed_slots.tolist() == [0]
        return
    with pytest.raises(ValueError, match=r"plan 7: array \w+ "):
        decode(raw)


def test_offsets_that_run_backwards_are_named() -> None:
    plan = small_plan()
    for offsets in ([0, -5], [1, 5], [0, 4], [0, 6], [-1, 5]):
        arrays = {n: getattr(plan.arrays, n) for n in NAMES} | {"new_cu_tokens": np.array(offsets, np.int32)}
        raw = encode(StepPlan(step_id=7, k=1, num_verify=1, num_logprobs=-1, split=False, arrays=PlanArrays(**arrays)))
        with pytest.raises(ValueError, match=r"array new_(cu_)?tokens"):
            decode(raw)


def test_bytes_behind_the_last_array_are_refused() -> None:
    body = encode(small_plan())[HEADER_SIZE :]
    with pytest.raises(ValueError, match="plan 7: 8 bytes after"):
        decode(seal(body + bytes(8), num_verify=1))


def test_header_fields_are_checked_and_named() -> None:
    body = encode(small_plan())[HEADER_SIZE :]
    assert_equal(decode(seal(body, num_verify=1)), small_plan())
    for wrong, message in (
        (dict(version=VERSION + 1), f"version {VERSION + 1}"),
        (dict(count=len(NAMES) + 1), f"{len(NAMES) + 1} arrays"),
        (dict(num_verify=3), "num_verify = 3"),
        (dict(num_verify=-1), "num_verify = -1"),
        (dict(num_verify=1, k=-1), "k = -1"),
        (dict(num_verify=1, flags=4), "flags = 0x4"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(seal(body, **wrong))
    with pytest.raises(ValueError, match="magic"):
        decode(b"XXXX" + seal(body)[4:])


def test_parameters_of_a_request_have_one_size() -> None:
    """The wire form of sampling parameters is fixed: a change of it must come with a new plan version."""
    assert PARAM_DTYPE.itemsize == 68
    assert VERSION == 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(plans(), min_size=1, max_size=4), st.data())
def test_each_group_finds_its_section(sections: list[StepPlan], data: st.DataObject) -> None:
    raw = encode_step(sections)
    for group, plan in enumerate(sections):
        assert_equal(decode_section(raw, group), plan)
    with pytest.raises(ValueError, match=f"group {len(sections)}"):
        decode_section(raw, len(sections))
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(ValueError, match="section"):
        decode_section(raw[:cut], 0)
