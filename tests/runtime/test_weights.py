"""Reading checkpoints: slices, shards, float8 blocks, and one clear line for every fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.weights import WeightSource


def checkpoint(folder: Path, tensors: dict[str, Tensor]) -> WeightSource:
    save_file(tensors, folder / "model.safetensors")
    return WeightSource(folder)


def test_slices_equal_slices_of_the_whole(tmp_path: Path) -> None:
    values = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    source = checkpoint(tmp_path, {"w": values})
    whole = source.take("w", (10, 6))
    assert whole.dtype == torch.float32
    assert torch.equal(whole, values.float())
    assert torch.equal(source.take("w", (10, 6), rows=slice(2, 5)), values.float()[2:5])
    assert torch.equal(source.take("w", (10, 6), cols=slice(1, 3)), values.float()[:, 1:3])
    assert torch.equal(source.take("w", (10, 6), rows=slice(7, 10), cols=slice(4, 6)), values.float()[7:, 4:])
    assert source.take("w", (10, 6), dtype=None).dtype == torch.bfloat16
    into = torch.empty(3, 6)
    source.take_into(into, "w", (10, 6), rows=slice(0, 3))
    assert torch.equal(into, values.float()[:3])


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """float8 values and the scale of each 128 x 128 block."""
    rows, cols = values.shape
    scale = torch.empty(-(-rows // 128), -(-cols // 128))
    out = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            scale[i, j] = values[block].abs().max() / 448
            out[block] = (values[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return out, scale


def test_float8_blocks_are_scaled_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(300, 200, generator=generator) * torch.logspace(-3, 1, 300)[:, None]
    quantised, scale = quantise(values)
    source = checkpoint(tmp_path, {"w": quantised, "w_scale_inv": scale})
    expected = torch.empty(300, 200)
    for i in range(300):
        for j in range(2):
            cols = slice(j * 128, min((j + 1) * 128, 200))
            expected[i, cols] = quantised[i, cols].float() * scale[i // 128, j]
    whole = source.take("w", (300, 200))
    assert torch.equal(whole, expected)
    assert ((whole - values).abs() <= values.abs() * 0.07 + scale.max()).all()
    part = source.take("w", (300, 200), rows=slice(100, 290), cols=slice(120, 140))
    assert torch.equal(part, expected[100:290, 120:140])
    into = torch.empty(300, 200)
    source.take_into(into, "w", (300, 200))
    assert torch.equal(into, expected)
    source.check_consumed()  # the scale counts as used


def test_float8_without_a_scale_is_named(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, {"w": torch.ones(4, 4).to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="tensor w in .* is float8 but w_scale_inv is missing"):
        source.take("w", (4, 4))


def test_faults_name_the_tensor(tmp_path: Path) -> None:
    bad = torch.ones(3, 2)
    bad[1, 1] = torch.nan
    infinite = torch.full((2,), torch.inf)
    tensors = {"a": torch.ones(2, 3), "nan": bad, "inf": infinite, "ints": torch.ones(2, dtype=torch.int64)}
    source = checkpoint(tmp_path, tensors)
    with pytest.raises(ValueError, match="tensor b is missing from"):
        source.take("b", (1,))
    with pytest.raises(ValueError, match=r"tensor a in .*model.safetensors has shape \[2, 3\], expected \[3, 2\]"):
        source.take("a", (3, 2))
    with pytest.raises(ValueError, match="tensor nan in .* has 1 values that are not finite"):
        source.take("nan", (3, 2))
    with pytest.raises(ValueError, match="tensor inf in .* has 2 values that are not finite"):
        source.take_into(torch.empty(2), "inf", (2,))
    with pytest.raises(ValueError, match="tensor ints in .* has dtype I64"):
        source.take("ints", (2,))
    with pytest.raises(ValueError, match="unexpected tensors in .*model.safetensors: a"):
        WeightSource(tmp_path).check_consumed()
    fresh = WeightSource(tmp_path)
    fresh.ignore(["nan", "inf", "ints"])
    fresh.take("a", (2, 3))
    fresh.check_consumed()


def test_a_large_finite_sum_is_not_taken_for_an_overflow(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, {"w": torch.full((4,), 3e38)})
    assert source.take("w", (4,)).isfinite().all()


def test_copies_are_recognised(tmp_path: Path) -> None:
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    other = values.clone()
    other[4, 2] += 1
    tensors = {"w": values, "same": values.clone(), "other": other, "half": values.half()}
    source = checkpoint(tmp_path, tensors)
    assert source.is_copy("same", "w")
    assert not source.is_copy("other", "w")
    assert not source.is_copy("half", "w")
    source.take("w", (5, 3))
    with pytest.raises(ValueError, match="half, other$"):
        source.check_consumed()


def test_copies_are_compared_in_the_given_rows_only(tmp_path: Path) -> None:
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    other = values.clone()
    other[4, 2] += 1
    source = checkpoint(tmp_path, {"w": values, "other": other, "longer": torch.cat((values, values))})
    assert source.is_copy("other", "w", rows=slice(0, 4))
    assert not source.is_copy("other", "w", rows=slice(4, 6))
    assert not source.is_copy("longer", "w", rows=slice(0, 4))
    assert source.bytes_by_tensor() == {"w": 72, "other": 72}


def test_bytes_read_are_those_of_the_parts(tmp_path: Path) -> None:
    quantised, scale = quantise(torch.randn(300, 200, generator=torch.Generator().manual_seed(0)))
    source = checkpoint(tmp_path, {"w": torch.ones(10, 6).bfloat16(), "q": quantised, "q_scale_inv": scale})
    assert source.bytes_read == 0
    source.take("w", (10, 6), rows=slice(2, 5))
    source.take_into(torch.empty(3, 6), "w", (10, 6), rows=slice(2, 5))  # from memory
    source.take("w", (10, 6), cols=slice(0, 2))
    source.take("q", (300, 200), rows=slice(130, 256))  # the second of three rows of blocks
    assert source.bytes_by_tensor() == {"w": (3 * 6 + 10 * 2) * 2, "q": 126 * 200, "q_scale_inv": 2 * 4}
    assert source.bytes_read == 76 + 25_200 + 8


def test_tensors_left_to_other_ranks_are_checked_and_not_read(tmp_path: Path) -> None:
    quantised, scale = quantise(torch.ones(130, 4))
    tensors = {"w": torch.full((2, 3), torch.nan), "q": quantised, "q_scale_inv": scale, "ints": torch.ones(2).long()}
    source = checkpoint(tmp_path, tensors)
    with pytest.raises(ValueError, match="tensor absent is missing"):
        source.leave("absent", (2, 3))
    with pytest.raises(ValueError, match=r"tensor w in .* has shape \[2, 3\], expected \[3, 2\]"):
        source.leave("w", (3, 2))
    with pytest.raises(ValueError, match="tensor ints in .* has dtype I64"):
        source.leave("ints", (2,))
    with pytest.raises(ValueError, match="unexpected tensors"):
        source.check_consumed()
    source.leave("w", (2, 3))
    source.leave("q", (130, 4))
    source.ignore(["ints"])
    source.check_consumed()
    assert source.bytes_read == 0
    (tmp_path / "scale").mkdir()
    short = checkpoint(tmp_path / "scale", {"q": quantised, "q_scale_inv": scale[:1].clone()})
    with pytest.raises(ValueError, match=r"tensor q_scale_inv in .* has shape \[1, 1\], expected \[2, 1\]"):
        short.leave("q", (130, 4))


def test_missing_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        WeightSource(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
        WeightSource(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"\xff" * 64, (2**40).to_bytes(8, "little"), b"\x02\0\0\0\0\0\0\0[]", b"\x04\0\0\0\0\0\0\0{bad"],
)
def test_corrupt_headers_are_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="cannot read .*model.safetensors") as error:
        WeightSource(tmp_path)
    assert "\n" not in str(error.value)


def test_truncated_data_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100, 100)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot read .*model.safetensors"):
        WeightSource(tmp_path)


def index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    source = WeightSource(tmp_path)
    assert source.take("a", (2,)).tolist() == [1, 1]
    assert source.take("b", (3,)).tolist() == [0, 0, 0]
    index(tmp_path, {"a": "one.safetensors", "c": "two.safetensors"})
    with pytest.raises(ValueError, match=r"places tensor c in two.safetensors, which lacks it"):
        WeightSource(tmp_path)
    index(tmp_path, {"a": "absent.safetensors"})
    with pytest.raises(FileNotFoundError, match="no such file: .*absent.safetensors"):
        WeightSource(tmp_path)
    for bad in ([], None, "text"):
        index(tmp_path, bad)
        with pytest.raises(ValueError, match="is not a safetensors index"):
            WeightSource(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        WeightSource(tmp_path)
