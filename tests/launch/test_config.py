"""The configuration file: defaults, overrides, relative paths, and errors that name file, key and nearest match."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from launch.config import (
    BUILT_IN,
    DraftSection,
    EngineSection,
    ModelSection,
    ParallelSection,
    load_config,
    parse_override,
)
from runtime.config import EngineConfig


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.toml"
    path.write_text(text)
    return path


def test_the_demo_gives_an_engine_configuration(minnow: Path) -> None:
    engine = load_config(None).engine_config()
    assert engine.model == minnow
    assert (engine.draft_method, engine.draft_tokens, engine.k) == ("mtp", 1, 1)


def test_every_engine_field_can_be_set_from_a_file() -> None:
    sections = {*EngineSection.model_fields, *ParallelSection.model_fields}
    keys = {*sections, "model", "storage", "max_model_len", "draft_method", "draft_tokens"}
    assert keys == {field.name for field in dataclasses.fields(EngineConfig)}


def test_defaults_are_those_of_the_engine() -> None:
    engine = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    for section in (EngineSection(), ParallelSection()):
        assert section.model_dump() == {name: engine[name] for name in type(section).model_fields}
    assert ModelSection(path="x").storage == engine["storage"]
    assert DraftSection().method == engine["draft_method"]


def test_a_model_path_is_relative_to_its_file_and_in_an_override_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    file = write(tmp_path / "deep", '[model]\npath = "../there"\n')
    monkeypatch.chdir(tmp_path)
    assert Path(load_config(file).model.path).resolve() == tmp_path / "there"
    assert load_config(file, ["model.path=here"]).model.path == str(tmp_path / "here")
    assert load_config(file, ["model.path=2024"]).model.path == str(tmp_path / "2024")
    with pytest.raises(ValueError, match="--set: model.path = True: input should be a valid string"):
        load_config(file, ["model.path=true"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 0.5", 0.5),
        ("a.b=true", True),
        ('a.b="quoted"', "quoted"),
        ("a.b=bare words", "bare words"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ("a.b=1\nc = 2", "1\nc = 2"),
    ],
)
def test_override_values_are_toml_or_bare_strings(text: str, value: object) -> None:
    assert parse_override(text) == ("a", "b", value)


def test_overrides_win_in_order_and_dashes_are_underscores(tmp_path: Path) -> None:
    file = write(tmp_path, '[model]\npath = "m"\n[engine]\nmax_num_seqs = 4\n')
    config = load_config(file, ["engine.max-num-seqs=5", "engine.max_num_seqs=6"])
    assert config.engine.max_num_seqs == 6


@pytest.mark.parametrize("override", ["engine", "engine.threads", "threads=1", "=1", "a.b.c=1"])
def test_a_malformed_override_is_shown(override: str) -> None:
    with pytest.raises(ValueError, match="expected section.key=value"):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\npath='m'\n[engine]\nthread = 1", "unknown key 'engine.thread': did you mean 'threads'?"),
        ("[model]\npath='m'\n[engin]\nx = 1", "unknown key 'engin': did you mean 'engine'?"),
        ("[model]\npath='m'\n[draft]\nzzz = 1", "unknown key 'draft.zzz': known: method, tokens"),
        ("[engine]\nthreads = 1", "model is missing"),
        ("[model]\nstorage = 'auto'", "model.path is missing"),
        ("[model]\npath='m'\n[engine]\nthreads = 0", "engine.threads = 0: input should be greater than or equal to 1"),
        ("[model]\npath='m'\n[engine]\nthreads = '2'", "engine.threads = '2': input should be a valid integer"),
        ("[model]\npath='m'\n[engine]\nthreads = true", "engine.threads = True: input should be a valid integer"),
        ("[model]\npath='m'\nstorage='int8'", "model.storage = 'int8': input should be 'auto', 'float32' or 'float16'"),
        ("engine = 3\n[model]\npath='m'", "engine = 3: input should be"),
        ("[model", "not valid TOML"),
    ],
)
def test_faults_in_a_file_are_one_line_naming_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole message is compared below)
        load_config(file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


def test_faults_in_an_override_are_blamed_on_it(tmp_path: Path) -> None:
    file = write(tmp_path, '[model]\npath = "m"\n')
    for override in ("engine.threads=0", "engin.threads=1", "engine.thread=1"):
        with pytest.raises(ValueError, match="^--set: "):
            load_config(file, [override])


def test_the_layout_of_ranks(tmp_path: Path) -> None:
    file = write(tmp_path, f"[model]\npath = '{BUILT_IN.parent / 'minnow'}'\n[parallel]\ndp = 2\nsplit = 'off'\n")
    engine = load_config(file, ["parallel.tp=4", "parallel.split=on"]).engine_config()
    assert (engine.dp, engine.tp, engine.layout.ep, engine.split, engine.split_min_tokens) == (2, 4, 8, "on", None)
    for override, message in (
        ("parallel.tp=0", "parallel.tp = 0: input should be greater than or equal to 1"),
        ("parallel.split=maybe", "parallel.split = 'maybe': input should be 'auto', 'on' or 'off'"),
        ("parallel.tpp=2", "unknown key 'parallel.tpp': did you mean 'tp'?"),
    ):
        with pytest.raises(ValueError, match=f"^--set: {re.escape(message)}"):
            load_config(file, [override])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nope.toml: no such configuration file"):
        load_config(tmp_path / "nope.toml")


def test_the_configuration_is_frozen() -> None:
    config = load_config(None)
    with pytest.raises(ValidationError, match="frozen"):
        config.model.path = "other"  # type: ignore[misc]


def without_mtp(minnow: Path, folder: Path) -> Path:
    config = json.loads((minnow / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_draft_tokens_without_an_mtp_layer_are_refused(minnow: Path, tmp_path: Path) -> None:
    model = without_mtp(minnow, tmp_path)
    with pytest.raises(ValueError, match=r"draft.tokens = 2, but .* has no MTP layer .*: use --draft-tokens 0"):
        load_config(None, [f"model.path={model}", "draft.tokens=2"]).engine_config()


def test_draft_tokens_left_out_follow_the_model(minnow: Path, tmp_path: Path) -> None:
    file = write(tmp_path, f"[model]\npath = '{minnow}'\n")
    assert load_config(file).engine_config().k == 1
    assert load_config(file, [f"model.path={without_mtp(minnow, tmp_path)}"]).engine_config().k == 0


def test_the_built_in_configuration_runs_a_model_without_an_mtp_layer(minnow: Path, tmp_path: Path) -> None:
    """`--set model.path=DeepSeek-V2-Lite` is all it takes."""
    assert load_config(None, [f"model.path={without_mtp(minnow, tmp_path)}"]).engine_config().k == 0


def test_draft_tokens_contradict_the_method_off() -> None:
    with pytest.raises(ValueError, match="draft.tokens = 2 with draft.method = "):
        load_config(None, ["draft.method=off", "draft.tokens=2"]).engine_config()


def test_the_built_in_configuration_lies_in_the_checkout(root: Path) -> None:
    assert root / "configs" / "demo.toml" == BUILT_IN
