"""From a model folder to what the engine runs: target, drafter, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp.drafter import Drafter, MtpDrafter
from runtime.config import EngineConfig
from runtime.executor import TargetModel
from runtime.models.config import load_model_config
from runtime.models.deepseek import DeepseekModel
from runtime.serve.detokenizer import DetokenizerFactory
from runtime.serve.tokenizer import load_tokenizer
from runtime.weights import WeightSource


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A target with its drafter. `detokenizers` is None for a folder without a tokenizer: no text, ids only."""

    model: TargetModel
    drafter: Drafter | None
    device: torch.device
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    detokenizers: DetokenizerFactory | None


def load_model(config: EngineConfig) -> LoadedModel:
    """Read the weights that `config` needs; the MTP layer only if it drafts.

    Raises ValueError or FileNotFoundError naming the file, tensor or key at fault.
    """
    model_config = load_model_config(config.model)
    if config.k and not model_config.num_mtp_layers:
        raise ValueError(
            f"draft_tokens = {config.draft_tokens}: {config.model} has no MTP layer (num_nextn_predict_layers = 0); "
            "set draft_tokens to 0"
        )
    device = _device(config.device)
    torch.set_num_threads(config.threads)
    with torch.inference_mode(), WeightSource(config.model) as source:
        model = DeepseekModel.load(
            source, model_config, device=device, storage=config.storage, with_mtp=config.k > 0
        )
    drafter = None
    if config.k:
        assert model.mtp is not None
        drafter = MtpDrafter(model.mtp, vocab_size=model_config.vocab_size, hidden_size=model_config.hidden_size)
    has_tokenizer = (config.model / "tokenizer.json").exists()
    return LoadedModel(
        model=model, drafter=drafter, device=device, vocab_size=model_config.vocab_size,
        max_position_embeddings=model_config.max_position_embeddings, eos_token_ids=model_config.eos_token_ids,
        detokenizers=DetokenizerFactory(load_tokenizer(config.model)) if has_tokenizer else None,
    )


def _device(name: str) -> torch.device:
    """Raises ValueError for a device that is no device, or not here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:  # torch raises each of them
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"device = {name!r}: expected cpu, or an accelerator of this machine ({reason})") from None
    return device
