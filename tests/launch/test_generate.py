"""`lockstep generate` around a fake engine: order, figures, precedence of sampling fields, errors and exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from launch.generate import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, GenerateOptions, run
from tests.launch.fake_engine import FakeEngine

KEYS = ["id", "prompt", "text", "token_ids", "finish_reason", "num_prompt_tokens", "stats"]
STATS = ["steps", "drafted", "accepted", "acceptance_rate", "tokens_per_step", "ttft_ms", "tokens_per_s"]


def write_rows(folder: Path, *rows: object) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def run_json(capsys: pytest.CaptureFixture[str], engine: FakeEngine, **options: Any) -> tuple[int, list[Any], str]:
    code = run(GenerateOptions(json=True, **options), engine.factory())
    captured = capsys.readouterr()
    return code, [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_json_lines_in_input_order_whatever_order_requests_finish_in(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = run_json(capsys, FakeEngine(), prompts=["a", "b", "c"])
    assert code == EXIT_OK
    assert [line.get("id") for line in lines] == ["0", "1", "2", None]
    assert [line["prompt"] for line in lines[:3]] == ["a", "b", "c"]
    assert list(lines[0]) == KEYS
    assert list(lines[0]["stats"]) == STATS
    assert lines[0]["text"] == "one two three"
    assert lines[0]["token_ids"] == [10, 11, 12]
    assert lines[0]["finish_reason"] == "length"
    assert err == ""


def test_figures_of_a_request_and_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run_json(capsys, FakeEngine(), prompts=["a", "b"])
    assert lines[0]["stats"] == {
        "steps": 1, "drafted": 2, "accepted": 1, "acceptance_rate": 0.5, "tokens_per_step": 2.0, "ttft_ms": 500.0,
        "tokens_per_s": 2.0,
    }  # fmt: skip
    summary = lines[-1]["summary"]
    assert set(STATS) <= set(summary)
    assert (summary["num_prompts"], summary["num_errors"], summary["num_tokens"]) == (2, 0, 6)
    assert (summary["steps"], summary["drafted"], summary["accepted"]) == (2, 4, 2)
    assert (summary["acceptance_rate"], summary["tokens_per_step"]) == (0.5, 2.0)
    assert summary["acceptance_per_position"] == [1.0, 0.0]


def test_prompts_are_tokenised_with_bos_and_the_engine_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    run_json(capsys, engine, prompts=["hello"])
    assert engine.submitted[0].prompt_token_ids[0] == 0
    assert engine.closed


def test_precedence_flag_then_row_then_config_then_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, minnow: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).symlink_to(minnow / name)
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 40}')
    config = tmp_path / "c.toml"
    config.write_text('[model]\npath = "model"\n[generate]\ntop_k = 30\nmax_tokens = 7\n')
    file = write_rows(tmp_path, {"prompt": "a", "max_tokens": 5, "seed": 1}, {"prompt": "b"})
    engine = FakeEngine()
    run_json(capsys, engine, prompts_file=file, config=config, flags={"seed": 9})
    first, second = (request.sampling for request in engine.submitted)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens, first.seed) == (0.6, 0.9, 30, 5, 9)
    assert second.max_tokens == 7


@pytest.mark.parametrize("generation_config", ['{"temperature": 0.6}', '{"do_sample": false, "temperature": 0.6}'])
def test_a_model_that_does_not_ask_for_sampling_is_greedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, minnow: Path, generation_config: str
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(minnow / name)
    (tmp_path / "generation_config.json").write_text(generation_config)
    engine = FakeEngine()
    run_json(capsys, engine, prompts=["a"], overrides=[f"model.path={tmp_path}"])
    assert engine.submitted[0].sampling.temperature == 0.0


def test_a_faulty_row_is_its_own_error_and_the_others_go_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {"id": "good", "prompt": "fine", "kind": "code"},
        "{not json",
        {"id": "none"},
        {"id": "empty", "prompt": ""},
        {"id": 7, "prompt": 3},
        {"id": "type", "prompt": "x", "max_tokens": "many"},
        {"id": "range", "prompt": "x", "temperature": -1},
        {"id": "typo", "prompt": "x", "temprature": 1},
        {"id": "foreign", "prompt": "x", "max_new_tokens": 4},
        {"id": "long", "prompt": "word " * 200},
        '{"id": "surrogate", "prompt": "\\ud800"}',
        "[1]",
        {"id": "last", "prompt": "fine too"},
    ]
    code, lines, err = run_json(capsys, FakeEngine(), prompts_file=write_rows(tmp_path, *rows))
    assert code == EXIT_USAGE
    assert len(lines) == len(rows) + 1
    errors = {line["id"]: line["error"] for line in lines[:-1] if "error" in line}
    assert {line["id"] for line in lines[:-1] if line["finish_reason"] == "length"} == {"good", "last"}
    assert all(line["finish_reason"] == "error" and line["token_ids"] == [] for line in lines[:-1] if "error" in line)
    assert "line 2: not valid JSON" in errors["1"]
    assert errors["none"] == "line 3: no prompt"
    assert errors["empty"] == "empty prompt"
    assert errors[7] == "line 5: prompt = 3: expected a string"
    assert errors["type"] == 'line 6: max_tokens = "many": expected an integer'
    assert errors["range"] == "temperature = -1.0: expected a finite number >= 0"
    assert errors["typo"] == "line 8: unknown field 'temprature': did you mean 'temperature'?"
    assert errors["foreign"] == "line 9: unknown field 'max_new_tokens': did you mean 'max_tokens'?"
    assert errors["long"].startswith("prompt of 202 tokens")
    assert "not valid Unicode" in errors["surrogate"]
    assert errors["11"] == "line 12: expected an object, found a list"
    assert lines[-1]["summary"]["num_errors"] == len(errors) == len(err.splitlines())


def test_a_failing_request_is_a_failure_not_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = run_json(capsys, FakeEngine(error_for="1"), prompts=["a", "b", "c"])
    assert code == EXIT_FAILURE
    assert [line["finish_reason"] for line in lines[:3]] == ["length", "error", "length"]
    assert err == "lockstep: error: prompt 1: NaN in row\n"


def test_an_error_in_a_step_is_a_failure_and_closes_the_engine() -> None:
    engine = FakeEngine(raises=ValueError("shape"))
    with pytest.raises(RuntimeError, match="the engine failed: shape"):
        run(GenerateOptions(prompts=["a"]), engine.factory())
    assert engine.closed


def test_one_prompt_streams_text_and_then_a_line_of_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(GenerateOptions(prompts=["a"]), FakeEngine().factory()) == EXIT_OK
    text, figures = capsys.readouterr().out.splitlines()
    assert text == "one two three"
    assert figures.startswith("3 tokens, 1 steps, acceptance 0.500, 2.00 tokens/step, ")
    assert figures.endswith(" tokens/s, time to first token 500.0 ms")


def test_several_prompts_stream_in_input_order_under_headers(capsys: pytest.CaptureFixture[str]) -> None:
    run(GenerateOptions(prompts=["first\nline", "", "third"]), FakeEngine().factory())
    blocks = capsys.readouterr().out.split("\n\n")
    assert blocks[0] == "--- 0 --- first line\none two three"
    assert blocks[1] == "--- 1 --- \n[empty prompt]"
    assert blocks[2] == "--- 2 --- third\none two three"
    assert blocks[3].startswith("6 tokens, ")


def test_prompts_of_the_configuration_are_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run_json(capsys, FakeEngine(max_prompt_tokens=1000))
    assert len(lines) == 4
    assert all(line["finish_reason"] == "length" for line in lines[:3])


def test_without_any_prompt_the_error_says_where_they_can_come_from() -> None:
    with pytest.raises(ValueError, match="no prompt: none on the command line and none in generate.prompts"):
        run(GenerateOptions(overrides=["generate.prompts=[]"]), FakeEngine().factory())


def test_wrong_flags_are_refused_before_anything_is_loaded() -> None:
    engine = FakeEngine()
    with pytest.raises(ValueError, match="max_tokens = -1: expected an integer >= 1"):
        run(GenerateOptions(prompts=["a"], flags={"max_tokens": -1}), engine.factory())
    assert engine.config is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_goes_to_a_terminal_on_stderr_and_leaves_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr("launch.printers.REFRESH_S", 0.0)
    assert run(GenerateOptions(prompts=["a", "b"], json=True), FakeEngine().factory()) == EXIT_OK
    assert "0/2 prompts, 1 tokens, " in err.getvalue()
    assert err.getvalue().endswith("\r\x1b[K")
    assert all(json.loads(line) for line in out.getvalue().splitlines())


def test_control_characters_reach_a_pipe_but_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("a\x1b[2J\x9b", "b\n\tc", "d")
    for out, text in ((io.StringIO(), "a\x1b[2J\x9bb\n\tcd\n"), (Terminal(), "a[2Jb\n\tcd\n")):
        monkeypatch.setattr("sys.stdout", out)
        run(GenerateOptions(prompts=["x"]), FakeEngine(words=words).factory())
        assert out.getvalue().startswith(text)
