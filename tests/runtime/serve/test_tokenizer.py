"""Prompt ids equal those of transformers on the same folder, whatever its post-processor is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from runtime.serve.tokenizer import encode_prompt, load_tokenizer

TEXTS = [
    "",
    "hello world",
    " leading space",
    "def f(x):\n    return x * 2\n",
    "naïve 中文 🙂 e\u0301",
    "<|bos|>spelled out<|eos|> twice",
    "\t\r\n\x00",
]


def copy_with(minnow: Path, folder: Path, post_processor: Any, **changes: Any) -> Path:
    """minnow's tokenizer with another post-processor and other entries in tokenizer_config.json (None: removed)."""
    tokenizer = json.loads((minnow / "tokenizer.json").read_text())
    if post_processor != "own":
        tokenizer["post_processor"] = post_processor
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((minnow / "tokenizer_config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("post_processor", ["own", BYTE_LEVEL, None], ids=["own", "byte_level", "none"])
def test_ids_equal_transformers(minnow: Path, tmp_path: Path, post_processor: Any, add_bos: bool | None) -> None:
    folder = copy_with(minnow, tmp_path, post_processor, add_bos_token=add_bos)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert list(encode_prompt(ours, text)) == theirs(text).input_ids


@pytest.mark.parametrize("bos", ["<|bos|>", {"__type": "AddedToken", "content": "<|bos|>"}], ids=["text", "object"])
@pytest.mark.parametrize("post_processor", [BYTE_LEVEL, None], ids=["byte_level", "none"])
def test_published_deepseek_folders_add_bos_by_their_class(
    minnow: Path, tmp_path: Path, post_processor: Any, bos: Any
) -> None:
    changes = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": bos}
    with_bos = load_tokenizer(copy_with(minnow, tmp_path, post_processor, add_bos_token=True, **changes))
    without = load_tokenizer(copy_with(minnow, tmp_path, post_processor, add_bos_token=False, **changes))
    own = load_tokenizer(minnow)
    for text in TEXTS:
        assert encode_prompt(with_bos, text) == (0, *encode_prompt(without, text)) == encode_prompt(own, text)


def test_a_template_that_adds_bos_is_not_doubled(minnow: Path, tmp_path: Path) -> None:
    folder = copy_with(minnow, tmp_path, "own", tokenizer_class="LlamaTokenizerFast", add_bos_token=True)
    assert encode_prompt(load_tokenizer(folder), "hello") == encode_prompt(load_tokenizer(minnow), "hello")


def test_minnow_prompts_begin_with_bos(minnow: Path) -> None:
    assert encode_prompt(load_tokenizer(minnow), "hello")[0] == 0


def test_lone_surrogates_are_refused_in_one_line(minnow: Path) -> None:
    with pytest.raises(ValueError, match="not valid Unicode text: surrogates not allowed at character 1"):
        encode_prompt(load_tokenizer(minnow), "a\ud800")


def test_a_faulty_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json: not a usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json: no such file"):
        load_tokenizer(tmp_path)
