"""Prompt text to token ids: `tokenizer.json`, and the one rule of `tokenizer_config.json` that it may lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises FileNotFoundError or ValueError in one line naming the file.

    `LlamaTokenizer` classes add BOS by `add_bos_token`, not by the post-processor: DeepSeek's published checkpoints
    rely on it (transformers 4 honours it, transformers 5 drops it beside a tokenizer.json).
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (a model folder needs its tokenizer.json)")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (tokenizers raises bare Exception for any fault in the file)
        raise ValueError(f"{path}: not a usable tokenizer: {' '.join(str(error).split())}") from None
    bos = _bos_to_add(model / "tokenizer_config.json")
    if bos is not None and not tokenizer.encode("").ids:
        _add_bos(tokenizer, bos, model)
    return tokenizer


def _bos_to_add(path: Path) -> str | None:
    """The BOS token that the class in tokenizer_config.json puts in front by itself; None when it does not."""
    if not path.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not str(config.get("tokenizer_class")).startswith("LlamaTokenizer") or not config.get("add_bos_token"):
        return None
    bos = config.get("bos_token")
    return bos.get("content") if isinstance(bos, dict) else bos


def _add_bos(tokenizer: Tokenizer, bos: str, model: Path) -> None:
    bos_id = tokenizer.token_to_id(bos)
    if bos_id is None:
        raise ValueError(f"{model}: bos_token {bos!r} of tokenizer_config.json is not in tokenizer.json")
    template = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])
    own = tokenizer.post_processor
    tokenizer.post_processor = template if own is None else processors.Sequence([own, template])


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids of a prompt: BOS and the like come from the post-processor, and special tokens spelled out in it count.

    Raises ValueError for lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode text: {error.reason} at character {error.start}") from None
    return tuple(tokenizer.encode(text).ids)
