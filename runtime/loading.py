"""From a model folder to what the engine runs: facts for the controller; target and drafter for a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from mtp.drafter import Drafter, MtpDrafter
from parallel.layout import RankGroups, solo_groups
from parallel.trace import Recorder
from runtime.attention.meta import KvSpec
from runtime.config import EngineConfig
from runtime.executor import TargetModel
from runtime.load_progress import LoadProgress, expected_bytes
from runtime.models.config import ModelConfig, load_model_config
from runtime.models.deepseek import DeepseekModel, kv_spec
from runtime.placing import first_placement
from runtime.rank_experts import HeldExperts
from runtime.serve.detokenizer import DetokenizerFactory
from runtime.serve.tokenizer import load_tokenizer
from runtime.weights import WeightSource


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the controller must know of a model; no weight is read for it.

    `lookahead`: tokens after a position that the drafter's cache entry depends on, 0 without drafts. `detokenizers` is
    None for a folder without a tokenizer: no text, ids only.
    """

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    kv_spec: KvSpec
    lookahead: int
    detokenizers: DetokenizerFactory | None


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A target with its drafter, on one rank."""

    facts: ModelFacts
    model: TargetModel
    drafter: Drafter | None
    device: torch.device
    bytes_read: int = 0
    experts: HeldExperts | None = None  # where experts are placed
    trace: Recorder = field(default_factory=Recorder)  # where the model notes what it does, while somebody wants it


def read_facts(config: EngineConfig, *, with_text: bool = True) -> ModelFacts:
    """`with_text=False` leaves the tokenizer alone: a rank in its own process makes no text.

    Raises ValueError or FileNotFoundError naming the file or key at fault.
    """
    model = _model_config(config)
    has_tokenizer = with_text and (config.model / "tokenizer.json").exists()
    return ModelFacts(
        vocab_size=model.vocab_size, max_position_embeddings=model.max_position_embeddings,
        eos_token_ids=model.eos_token_ids, kv_spec=kv_spec(model, with_mtp=config.k > 0),
        lookahead=MtpDrafter.lookahead if config.k else 0,
        detokenizers=DetokenizerFactory(load_tokenizer(config.model)) if has_tokenizer else None,
    )


def load_model(
    config: EngineConfig, groups: RankGroups | None = None, *, phase: Callable[[str], None] | None = None
) -> LoadedModel:
    """Read this rank's share of the weights; of the MTP layer only if it drafts. `groups=None`: the only rank.

    `phase` is told how far it is.

    Raises ValueError or FileNotFoundError naming the file, tensor or key at fault.
    """
    model_config = _model_config(config)
    device = _device(config.device)
    torch.set_num_threads(config.threads)
    trace = groups.trace if groups is not None and groups.trace is not None else Recorder()
    own = replace(groups if groups is not None else solo_groups(), trace=trace)
    placement = first_placement(config, model_config)
    with torch.inference_mode(), WeightSource(config.model) as source:
        if phase is not None:
            source.on_read = LoadProgress(phase, _expected_bytes(source, config, model_config))
        model = DeepseekModel.load(
            source, model_config, groups=own, device=device, storage=config.storage, with_mtp=config.k > 0,
            dispatch=config.dispatch, placement=placement, ranks_per_node=config.ranks_per_node,
        )
        bytes_read = source.bytes_read
    drafter = None
    if config.k:
        assert model.mtp is not None
        drafter = MtpDrafter(model.mtp, hidden_size=model_config.hidden_size)
    experts = None
    if placement is not None:
        experts = HeldExperts(
            placement=placement, layers=model.placed, fingerprints=model.fingerprints, model=model_config,
            folder=config.model, device=device, storage=config.storage,
        )
    return LoadedModel(
        facts=read_facts(config, with_text=groups is None), model=model, drafter=drafter, device=device,
        bytes_read=bytes_read, experts=experts, trace=trace,
    )


def _expected_bytes(source: WeightSource, config: EngineConfig, model: ModelConfig) -> int:
    copies = 1 + config.redundant_experts / model.num_experts if model.num_experts else 1.0
    skip = None if config.k else f"model.layers.{model.num_hidden_layers}."
    return expected_bytes(source.sizes(), config.layout, copies=copies, skip=skip)


def check_device(name: str) -> None:
    """Raises ValueError for a device that is no device, or not here. Uses none: a controller must not hold any."""
    if not _is_here(name):
        raise ValueError(f"device = {name!r}: expected cpu, or an accelerator of this machine")


def local_device(name: str, local_rank: int, num_ranks: int) -> str:
    """The device of one of `num_ranks` ranks on this machine: all share a CPU, each has an accelerator of its own.

    Raises ValueError where there are not as many, or where one was named for all.
    """
    kind, _, index = name.partition(":")
    if num_ranks == 1 or kind == "cpu":
        return name
    count = torch.accelerator.device_count()
    if index or num_ranks > count:
        raise ValueError(
            f"device = {name!r}: {num_ranks} ranks need one accelerator each (this machine has {count}); set "
            f"{kind!r} and a layout of at most {count} ranks"
        )
    return f"{kind}:{local_rank}"


def _is_here(name: str) -> bool:
    try:
        device = torch.device(name)
    except RuntimeError:
        return False
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_known = accelerator is not None and accelerator.type == device.type
    return is_known and (device.index or 0) < torch.accelerator.device_count()


def _model_config(config: EngineConfig) -> ModelConfig:
    model_config = load_model_config(config.model)
    if config.k and not model_config.num_mtp_layers:
        raise ValueError(
            f"draft_tokens = {config.draft_tokens}: {config.model} has no MTP layer (num_nextn_predict_layers = 0); "
            "set draft_tokens to 0"
        )
    return model_config


def _device(name: str) -> torch.device:
    """Raises ValueError for a device that is no device, or not here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:  # torch raises each of them
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"device = {name!r}: expected cpu, or an accelerator of this machine ({reason})") from None
    return device
