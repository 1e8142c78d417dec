"""The commands on the embedded model: ids and figures agree, and bad input is one line while the others go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch import bench_verify
from launch.cli import run_command
from runtime.serve.tokenizer import load_tokenizer

PROMPTS = ["def main():\n", "The king said", "Return the"]


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[Any], str]:
    code = run_command(["generate", "--json", *args])
    captured = capsys.readouterr()
    return code, [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_drafting_changes_no_id_and_text_is_the_decoded_ids(capsys: pytest.CaptureFixture[str], minnow: Path) -> None:
    outputs = []
    for k in ("0", "1", "3"):
        code, lines, err = run_json(capsys, *PROMPTS, "--max-tokens", "16", "--ignore-eos", "--draft-tokens", k)
        assert (code, err, len(lines)) == (0, "", 4)
        outputs.append([line["token_ids"] for line in lines[:-1]])
        tokenizer = load_tokenizer(minnow)
        assert all(line["text"] == tokenizer.decode(line["token_ids"]) for line in lines[:-1])
        assert all(len(line["token_ids"]) == 16 for line in lines[:-1])
    assert outputs[0] == outputs[1] == outputs[2]


def test_figures_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run_json(capsys, *PROMPTS, "--max-tokens", "20", "--ignore-eos", "--draft-tokens", "1")
    for line in lines[:-1]:
        stats = line["stats"]
        assert 1 + stats["steps"] + stats["accepted"] == 20
        assert stats["acceptance_rate"] == round(stats["accepted"] / stats["drafted"], 4)
        assert stats["tokens_per_step"] == round(19 / stats["steps"], 4)
        assert stats["ttft_ms"] > 0
        assert stats["tokens_per_s"] > 0
    for name in ("steps", "drafted", "accepted"):
        assert lines[-1]["summary"][name] == sum(line["stats"][name] for line in lines[:-1])


@pytest.mark.parametrize("k", [1, 3])
def test_acceptance_per_position_adds_up_to_the_rate(capsys: pytest.CaptureFixture[str], k: int) -> None:
    """Steps near the end of a request have no room for all drafts: they count where they had."""
    _, lines, _ = run_json(capsys, *PROMPTS, "--max-tokens", "16", "--ignore-eos", "--draft-tokens", str(k))
    summary = lines[-1]["summary"]
    shares = summary["acceptance_per_position"]
    assert len(shares) == k
    assert summary["drafted"] < k * summary["steps"]
    assert min(shares) <= summary["acceptance_rate"] <= max(shares)
    assert 0 < summary["acceptance_rate"] < 1


def test_plain_decoding_has_no_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = run_json(capsys, "x", "--max-tokens", "4", "--draft-tokens", "0", "--ignore-eos")
    stats = lines[0]["stats"]
    assert (stats["drafted"], stats["acceptance_rate"], stats["tokens_per_step"]) == (0, None, 1.0)


def test_seeded_sampling_repeats_for_any_number_of_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*PROMPTS, "--max-tokens", "12", "--temperature", "1", "--top-p", "0.9", "--top-k", "50", "--ignore-eos"]
    runs = {
        (seed, k): [line["token_ids"] for line in run_json(capsys, *args, "--seed", seed, "--draft-tokens", k)[1][:-1]]
        for seed, k in (("1", "0"), ("1", "2"), ("2", "0"))
    }
    assert runs["1", "0"] == runs["1", "2"]
    assert runs["1", "0"] != runs["2", "0"]


def test_fields_of_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {"id": "stop", "prompt": "The king said", "stop": "the", "max_tokens": 64},
        {"id": "stop-id", "prompt": "The king said", "stop_token_ids": [457], "max_tokens": 64},
        {"id": "logprobs", "prompt": "def main():", "logprobs": 2, "max_tokens": 3},
        {"id": "bias", "prompt": "def main():", "logit_bias": {"77": 100}, "max_tokens": 3},
        {"id": "outside", "prompt": "x", "logit_bias": {"9999": 1}},
        {"id": "long", "prompt": "x y z w " * 600},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    code, lines, err = run_json(capsys, "--prompts", str(file), "--draft-tokens", "2")
    by_id = {line["id"]: line for line in lines[:-1]}
    assert code == 2
    assert (by_id["stop"]["finish_reason"], by_id["stop"]["stop_reason"]) == ("stop", "the")
    assert "the" not in by_id["stop"]["text"]
    assert by_id["stop-id"]["stop_reason"] == by_id["stop-id"]["token_ids"][-1] == 457
    assert [entry["token_id"] for entry in by_id["logprobs"]["logprobs"]] == by_id["logprobs"]["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in by_id["logprobs"]["logprobs"])
    assert by_id["bias"]["token_ids"] == [77, 77, 77]
    assert by_id["outside"]["error"] == "logit_bias has token id 9999: expected 0..4095"
    assert by_id["long"]["error"].endswith("expected at most 2047 (max_model_len 2048 less one to generate)")
    assert len(err.splitlines()) == 2


def test_drafts_and_acceptance_of_a_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {"id": None, "prompt": "def main():", "draft_tokens": 0},
        {"prompt": "def main():"},
        {"prompt": "x", "acceptance": "maybe"},
        {"prompt": "x", "draft_tokens": -1},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    args = ["--prompts", str(file), "--max-tokens", "8", "--ignore-eos"]
    code, lines, _ = run_json(capsys, *args)
    assert code == 2
    assert [line["id"] for line in lines[:-1]] == ["0", "1", "2", "3"]
    assert lines[0]["stats"]["drafted"] == 0 < lines[1]["stats"]["drafted"]
    assert lines[2]["error"] == "acceptance = 'maybe': expected \"coupled\" or \"ratio\""
    assert lines[3]["error"] == "draft_tokens = -1: expected an integer >= 0"
    lines = run_json(capsys, *args, "--draft-tokens", "1")[1]
    assert lines[0]["stats"]["drafted"] == lines[1]["stats"]["drafted"] > 0, "a flag overrides the row"


def test_more_prompts_than_running_requests_queue(capsys: pytest.CaptureFixture[str]) -> None:
    args = [*PROMPTS, *PROMPTS, "--max-tokens", "6", "--ignore-eos"]
    alone = run_json(capsys, *args, "--set", "engine.max_num_seqs=1")[1]
    together = run_json(capsys, *args)[1]
    assert [line["token_ids"] for line in alone[:-1]] == [line["token_ids"] for line in together[:-1]]


def test_as_a_process_text_streams_and_figures_come_last(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "generate", "--max-tokens", "5"], cwd=root, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(root)}, timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("--- 0 --- def read_lines(path)")
    assert done.stdout.splitlines()[-1].startswith("15 tokens, ")


def truncate_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def absurd_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def rewrite(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


NORM = "model.layers.2.input_layernorm.weight"


def set_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM][3] = torch.nan


def integer_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM].to(torch.int32)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NORM]


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM][:-1].clone()


def extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mystery.weight"] = torch.zeros(2)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (truncate_header, "model.safetensors"),
        (absurd_header, "model.safetensors"),
        (rewrite(set_nan), NORM),
        (rewrite(integer_dtype), NORM),
        (rewrite(drop), NORM),
        (rewrite(reshape), NORM),
        (rewrite(extra), "model.layers.2.mystery.weight"),
        (edit_config(hidden_act="gelu"), "hidden_act"),
        (edit_config(model_type="llama"), "model_type"),
        (edit_config(num_nextn_predict_layers=0), "no MTP layer"),
    ],
    ids=[
        "no config", "no weights", "no tokenizer", "config not JSON", "short header", "absurd header", "NaN", "dtype",
        "missing", "shape", "unexpected", "activation", "family", "no MTP layer",
    ],
)  # fmt: skip
def test_a_faulty_model_is_one_line_naming_what_is_wrong(
    capsys: pytest.CaptureFixture[str], minnow: Path, tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(minnow, model)
    damage(model)
    code, lines, err = run_json(capsys, "x", "--set", f"model.path={model}", "--draft-tokens", "1")
    assert (code, lines) == (2, [])
    assert err.startswith("lockstep: error: ")
    assert err.count("\n") == 1
    assert named in err


def test_bench_decode(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--batch", "2", "--prompt-len", "8", "--output-len", "8", "--repeat", "1", "--draft-tokens", "2", "--json"]
    for kind in ("random", "repeat", "succ"):
        assert run_command(["bench", "decode", *args, "--prompts", kind]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["batch"], figures["draft_tokens"], figures["threads"]) == (2, 2, 1)
        assert figures["prefill_tokens_per_s"] > 0
        assert 0 <= figures["acceptance_rate"] <= 1
    assert run_command(["bench", "decode", "--output-len", "3000", "--repeat", "1"]) == 2
    assert "3032 tokens: expected at most max_model_len = 2048" in capsys.readouterr().err


def test_bench_verify(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_verify, "BATCHES", (1, 2))
    monkeypatch.setattr(bench_verify, "MIN_ROUNDS", 1)
    monkeypatch.setattr(bench_verify, "SECONDS_PER_BATCH", 0.0)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "The king said"}\n{"prompt": ""}\n')
    args = ["bench", "verify", "--prompts", str(file), "--max-tokens", "12", "--context", "20"]
    assert run_command([*args, "--json"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert captured.err == "lockstep: error: prompt 1: empty prompt\n"
    assert {batch: len(times) for batch, times in figures["pass_ms"].items()} == {"1": 8, "2": 8}
    assert figures["num_prompts"] == 1
    shares = figures["acceptance_per_position"]
    assert len(shares) == 3
    assert sorted(shares, reverse=True) == shares
    assert [len(bounds) for bounds in figures["gain_bound"].values()] == [3, 3]
    assert run_command([*args, "--draft-tokens", "0"]) == 0
    assert "no drafts" in capsys.readouterr().out


def test_an_interrupt_ends_it_with_130_and_no_traceback(root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "generate", "x", "--ignore-eos", "--max-tokens", "2000"], cwd=root,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    assert process.stdout.read(1)  # generation has begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
