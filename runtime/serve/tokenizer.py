"""Prompt text to token ids, as transformers 5 does it: `tokenizer.json` alone adds special tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises FileNotFoundError or ValueError in one line naming the file."""
    path = model / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file (a model folder needs its tokenizer.json)")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (tokenizers raises bare Exception for any fault in the file)
        raise ValueError(f"{path}: not a usable tokenizer: {' '.join(str(error).split())}") from None


def encode_prompt(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids of a prompt: BOS and the like come from the post-processor, and special tokens spelled out in it count.

    `add_bos_token` in tokenizer_config.json has no say beside a tokenizer.json (transformers 5 ignores it, too).
    Raises ValueError for lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode text: {error.reason} at character {error.start}") from None
    return tuple(tokenizer.encode(text).ids)
