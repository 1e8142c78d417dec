"""Facts of a process and the table of what differs: just those rows, and who holds each value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.config import LaunchConfig, load_config
from launch.model_files import WHOLE_BYTES, digest_of, file_facts
from launch.network import interface_of, mtu_of
from launch.preflight import CONTROLLER, arrived, compare, dispatch_capacity, gather_facts, stamp
from launch.rank_env import RankEnv

ENV = RankEnv(
    rank=0, world_size=2, local_rank=0, local_world_size=1, node_rank=0, num_nodes=2, source="manual", host="here"
)


@pytest.fixture
def config() -> LaunchConfig:
    return load_config(None)


def facts_of(*overrides: str) -> dict[str, str]:
    return gather_facts(load_config(None, overrides), ENV, address="127.0.0.1")


def test_equal_processes_agree_with_each_other_and_with_the_controller(config: LaunchConfig) -> None:
    facts = facts_of()
    assert compare({CONTROLLER: gather_facts(config, None), 0: facts, 1: dict(facts)}) is None
    assert (facts["nic"], facts["mtu"]) == ("lo", str(mtu_of("lo")))
    assert {"lockstep", "config", "version torch", "model model.safetensors", "dispatch capacity"} <= set(facts)


def test_only_rows_that_differ_are_shown_with_their_ranks() -> None:
    facts = facts_of()
    other = facts | {"mtu": "9000"}
    table = compare({0: facts, 1: facts, 2: other, 3: facts, 4: other})
    assert table is not None
    assert table.splitlines()[0] == "the processes of this launch differ in 1 thing:"
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["what", "value", "ranks"], ["mtu", str(mtu_of("lo")), "[r0-1,r3]"], ["9000", "[r2,r4]"],
    ]


def test_another_configuration_is_shown_by_its_keys() -> None:
    table = compare({0: facts_of(), 1: facts_of("engine.max_num_seqs=8")})
    assert table is not None
    shown = {line.split("  ")[1].strip() for line in table.splitlines()[2:]} - {""}
    assert shown == {"config", "config engine.max_num_seqs", "dispatch capacity"}


def test_what_may_differ_does_not_count() -> None:
    facts = facts_of()
    ranks = {0: facts | {"nic": "eth0"}, 1: facts | {"nic": "ens5"}}
    assert "ens5" in (compare(ranks) or "")
    assert compare(ranks, may_differ=["nic"]) is None


def test_a_model_file_that_is_missing_or_changed(tmp_path: Path, config: LaunchConfig) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(1000))
        (folder / "config.json").write_text("{}")
    (folders[1] / "model.safetensors").write_bytes(bytes(500) + b"\1" + bytes(499))
    (folders[2] / "config.json").unlink()
    table = compare(dict(enumerate(facts_of(f"model.path={folder}") for folder in folders))) or ""
    rows = [line.split() for line in table.splitlines()[2:]]
    assert [row[-1] for row in rows] == ["[r0-1]", "[r2]", "[r0,r2]", "[r1]"]
    assert "(none)" in rows[1]
    assert "model.path" not in table  # the folder itself may be another one on each node


def test_large_files_are_sampled_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.truncate(WHOLE_BYTES + 1)
    before = digest_of(path)
    assert before.endswith("(sampled)")
    for at in (0, WHOLE_BYTES):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\1")
        assert digest_of(path) != before
        before = digest_of(path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert file_facts(tmp_path / "nowhere") == {"folder": "missing"}
    assert file_facts(tmp_path) == {"folder": "no model files"}


def test_clocks_are_compared_by_how_far_they_are_from_one(config: LaunchConfig) -> None:
    raw = {"clock": "100.0"}
    late = {0: arrived(raw, now=100.0), 1: arrived({"clock": "340.5"}, now=340.0)}
    assert compare(late) is None  # facts of different moments, clocks that agree
    table = compare({0: arrived(raw, now=100.0), 1: arrived(raw, now=104.0)}) or ""
    assert [line.split() for line in table.splitlines()[2:]] == [
        ["clock", "offset", "+0.0", "s", "[r0]"], ["-4.0", "s", "[r1]"],
    ]
    assert compare({0: raw, 1: {"clock": "900.0"}}) is None  # no way to tell
    assert set(stamp({})) == {"clock"}


def test_variables_that_matter_are_facts_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0," * 20)
    monkeypatch.setenv("LOCKSTEP_SECRET", "sesame")
    monkeypatch.setenv("UNRELATED", "1")
    facts = facts_of()
    assert "env NCCL_IB_HCA" in facts
    assert "sesame" not in str(facts)
    assert "env UNRELATED" not in facts
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0," * 20 + "mlx5_1")
    assert "env NCCL_IB_HCA" in (compare({0: facts, 1: facts_of()}) or "")
    monkeypatch.delenv("NCCL_IB_HCA")
    assert "(none)" in (compare({0: facts, 1: facts_of()}) or "")


@pytest.mark.parametrize(
    "overrides",
    [
        (), ("parallel.tp=4", "engine.max_num_seqs=7"), ("draft.tokens=3",), ("draft.method=off",),
        ("parallel.dispatch_capacity=900",), ("engine.prefill_chunk_size=33", "parallel.tp=2"),
    ],
)
def test_the_capacity_is_that_of_the_engine(overrides: tuple[str, ...]) -> None:
    config = load_config(None, overrides)
    assert dispatch_capacity(config) == config.engine_config().capacity


def test_interfaces_are_found_by_their_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert mtu_of("nosuch0") is None


def test_facts_need_no_torch(root: Path) -> None:
    code = (
        "import sys; from launch.config import load_config; from launch.preflight import gather_facts; "
        "from launch.rank_env import RankEnv; env = RankEnv.from_environment({'RANK': '0', 'WORLD_SIZE': '1'}); "
        "assert gather_facts(load_config(None), env)['version torch'][0].isdigit(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
