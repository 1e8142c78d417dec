"""One TOML file -> frozen, validated configuration; `--set section.key=value` on top; unknown keys refused."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from runtime.config import EngineConfig
    from runtime.recovery import RestartLimits

BUILT_IN = Path(__file__).resolve().parent.parent / "configs" / "demo.toml"
_PATHS = (("model", "path"), ("parallel", "placement_file"))
_SET = re.compile(r"([A-Za-z_][\w-]*)\.([A-Za-z_][\w-]*)\s*=(.*)", re.DOTALL)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(_Section):
    """[model]: which checkpoint, how its weights are stored, and how long a context may grow (tokens)."""

    path: str
    storage: Literal["auto", "float32", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2)


class EngineSection(_Section):
    """[engine]: sizes of one step and of the cache; fields as in runtime.config.EngineConfig."""

    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    max_num_seqs: int = Field(default=32, ge=1)
    prefill_chunk_size: int = Field(default=512, ge=1)
    page_size: int = Field(default=16, ge=1)
    num_pages: int | None = Field(default=None, ge=2)
    kv_cache_bytes: int = Field(default=2 << 30, ge=1)
    prefix_cache: bool = True
    schedule: Literal["auto", "ahead", "settled"] = "auto"
    debug: bool = False


class ParallelSection(_Section):
    """[parallel]: `dp` attention groups of `tp` ranks, one process each, and whether a step runs as two halves."""

    dp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    split: Literal["auto", "on", "off"] = "auto"
    split_min_tokens: int | None = Field(default=None, ge=1)
    exchange: Literal["auto", "shared_memory", "sockets", "torch"] = "auto"
    dispatch: Literal["auto", "all_gather", "all_to_all"] = "auto"
    dispatch_capacity: int | None = Field(default=None, ge=1)
    redundant_experts: int = Field(default=0, ge=0)
    rebalance_steps: int | None = Field(default=None, ge=0)
    placement_file: str | None = None
    expert_source: Literal["ranks", "files"] = "ranks"
    ranks_per_node: int | None = Field(default=None, ge=1)


class DraftSection(_Section):
    """[draft]: who drafts and how many tokens a step. `tokens` left out: 1 with an MTP layer in the model, else 0."""

    method: Literal["mtp", "off"] = "mtp"
    tokens: int | None = Field(default=None, ge=0)


class GenerateSection(_Section):
    """[generate]: defaults of `lockstep generate`; a prompt row or a flag overrides them."""

    prompts: tuple[str, ...] = Field(default=(), strict=False)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields that were set, by the names of SamplingParams."""
        return self.model_dump(exclude={"prompts"}, exclude_none=True)


class ClusterSection(_Section):
    """[cluster]: where the controller listens, and how long it waits for what, in seconds.

    `bind`: HOST:PORT of the controller, port 0 for a free one. `advertise`: the address under which other hosts reach
    this host's ranks; the one that leads to the controller if left out. `secret_file`: holds the shared secret, unless
    the environment has LOCKSTEP_SECRET. `join_s`: between the first rank that reports and the last,
    and for the controller to be reached. `stall_s`: without
    a sign of life. `reform_s`: for replacements, or a connection that heals, after a failure. `may_differ`: facts, by
    their names or the beginnings of them, in which nodes may differ (`nic`, `env NCCL_IB`).
    """

    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    secret_file: str | None = None
    join_s: float = Field(default=25.0, gt=0)
    stall_s: float = Field(default=3.0, ge=0.5)
    reform_s: float = Field(default=60.0, gt=0)
    max_restarts: int = Field(default=5, ge=0)
    restart_window_s: float = Field(default=600.0, gt=0)
    spare: bool = True
    may_differ: tuple[str, ...] = Field(default=(), strict=False)

    def local_restarts(self) -> RestartLimits | None:
        """For the ranks of one machine, which are only started again where `max_restarts` is given."""
        from runtime.recovery import RestartLimits

        if "max_restarts" not in self.model_fields_set:
            return None
        return RestartLimits(max_restarts=self.max_restarts, window_s=self.restart_window_s)


class LaunchConfig(_Section):
    """A whole configuration file."""

    model: ModelSection
    engine: EngineSection = EngineSection()
    parallel: ParallelSection = ParallelSection()
    draft: DraftSection = DraftSection()
    cluster: ClusterSection = ClusterSection()
    generate: GenerateSection = GenerateSection()

    def engine_config(self) -> EngineConfig:
        """What the engine is built from. Raises ValueError or FileNotFoundError in one line."""
        from runtime.config import EngineConfig
        from runtime.models.config import load_model_config

        path = Path(self.model.path)
        num_mtp_layers = load_model_config(path).num_mtp_layers
        tokens = self.draft.tokens
        if tokens is None:
            tokens = 1 if self.draft.method == "mtp" and num_mtp_layers else 0
        if tokens and self.draft.method == "off":
            raise ValueError(f'draft.tokens = {tokens} with draft.method = "off": expected 0 tokens, or method "mtp"')
        if tokens and not num_mtp_layers:
            raise ValueError(
                f"draft.tokens = {tokens}, but {path} has no MTP layer (num_nextn_predict_layers is 0 or missing): "
                "use --draft-tokens 0"
            )
        return EngineConfig(
            model=path,
            storage=self.model.storage,
            max_model_len=self.model.max_model_len,
            draft_method="mtp" if tokens else "off",
            draft_tokens=tokens,
            **self.engine.model_dump(),
            **self.parallel.model_dump(),
        )


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> LaunchConfig:
    """Read a file (None: the built-in demo) and apply `section.key=value` overrides.

    Paths in the file are relative to the file, in an override to the working directory.
    Raises FileNotFoundError or ValueError in one line naming the file and the key.
    """
    file = path if path is not None else BUILT_IN
    values = _read(file)
    for section, key in _PATHS:
        table = values.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = str(file.resolve().parent / table[key])
    given: set[tuple[int | str, ...]] = set()
    for override in overrides:
        section, key, value = parse_override(override)
        given |= {(section, key)} | ({(section,)} if section not in values else set())
        table = values.setdefault(section, {})
        if not isinstance(table, dict):
            raise ValueError(f"{file}: {section} is not a section")
        table[key] = _absolute(value) if (section, key) in _PATHS else value
    try:
        return LaunchConfig.model_validate(values)
    except ValidationError as error:
        where = error.errors()[0]["loc"][:2]
        source = "--set" if where in given or where[:1] in given else str(file)
        raise ValueError(f"{source}: {_explain(error)}") from None


def _absolute(value: Any) -> Any:
    """The path that was typed; one spelled like a number (`--set model.path=2024`) is a path, too."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    return str(Path(value).resolve()) if isinstance(value, str) else value


def parse_override(text: str) -> tuple[str, str, Any]:
    """`section.key=value` taken apart; the value is read as TOML, and as a bare string where it is none."""
    match = _SET.fullmatch(text)
    if match is None:
        raise ValueError(f"--set {text}: expected section.key=value")
    section, key, raw = match[1], match[2].replace("-", "_"), match[3].strip()
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return section, key, raw
    return section, key, parsed["value"] if set(parsed) == {"value"} else raw


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` where something known is near, else the list of what is known."""
    names = sorted(known)
    found = difflib.get_close_matches(name.replace("-", "_").lower(), names, n=1)
    return f"did you mean {found[0]!r}?" if found else f"known: {', '.join(names)}"


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such configuration file")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid TOML: {' '.join(str(error).split())}") from None


def _explain(error: ValidationError) -> str:
    """The first fault in one line: where it is, what was given, what was expected."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {where!r}: {nearest(str(first['loc'][-1]), _known_keys(first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"{where} is missing"
    message = first["msg"]
    return f"{where} = {first['input']!r}: {message[0].lower()}{message[1:]}"


def _known_keys(section: tuple[int | str, ...]) -> Iterable[str]:
    if not section:
        return LaunchConfig.model_fields
    annotation = LaunchConfig.model_fields[str(section[0])].annotation
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    return annotation.model_fields
