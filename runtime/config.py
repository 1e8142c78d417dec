"""What an engine is built from: frozen, complete, validated against the model before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parallel.layout import Layout

Schedule = Literal["auto", "ahead", "settled"]
DraftMethod = Literal["mtp", "off"]
Storage = Literal["auto", "float32", "float16"]
Split = Literal["auto", "on", "off"]
Exchange = Literal["auto", "shared_memory", "sockets", "torch"]
Dispatch = Literal["auto", "all_gather", "all_to_all"]
ExpertSource = Literal["ranks", "files"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine. Sizes are in tokens, positions or pages; `None` means derived from the model or the machine.

    `prefill_chunk_size` bounds the prompt tokens of one step; verify rows come on top of it.
    `schedule`: "ahead" plans step N+1 while step N runs, "settled" only after its counts are known (same ids). "auto"
    is ahead on an accelerator and settled on the CPU, where planner and rank share an interpreter: there is nothing to
    overlap, and each hand-over between threads and each surplus step costs.
    `exchange`: what collectives run on; "auto" is shared memory between ranks on the CPU ("sockets" where they are on
    several hosts: TCP between hosts, shared memory inside each), torch.distributed elsewhere.
    `dispatch`: how tokens reach the experts of other ranks; "auto" is all_to_all on the CPU, all_gather elsewhere.
    `max_num_seqs`, `prefill_chunk_size` and the pages are those of one dp group. `dispatch_capacity`: most tokens that
    a rank sends to the experts at once (None: as many as a step can have); it must be the same on all ranks.
    `split`: whether a step runs as two halves; "auto" splits from `split_min_tokens` tokens a rank on, which is
    measured at start-up where it is None and a network is between ranks (runtime/split_calibration.py), else never.
    `redundant_experts`: slots of a layer, over all ranks, beyond one for each expert; busy experts get them.
    `rebalance_steps`: steps after which experts are placed anew by what they were asked for; 0: only when told to;
    None: experts stay where they are, unless another of these keys says that they are placed.
    `placement_file`: a saved placement to start with. `expert_source`: where weights of moved experts come from.
    `ranks_per_node`: experts are packed onto nodes of so many ranks before ranks (None: all ranks are near).
    """

    model: Path
    storage: Storage = "auto"
    device: str = "cpu"
    threads: int = 1
    max_num_seqs: int = 32
    prefill_chunk_size: int = 512
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None  # None: enough for max_num_seqs requests of max_model_len, within kv_cache_bytes
    kv_cache_bytes: int = 2 << 30
    prefix_cache: bool = True
    schedule: Schedule = "auto"
    draft_method: DraftMethod = "mtp"
    draft_tokens: int = 1
    dp: int = 1
    tp: int = 1
    split: Split = "auto"
    split_min_tokens: int | None = None
    exchange: Exchange = "auto"
    dispatch: Dispatch = "auto"
    dispatch_capacity: int | None = None
    redundant_experts: int = 0
    rebalance_steps: int | None = None
    placement_file: str | None = None
    expert_source: ExpertSource = "ranks"
    ranks_per_node: int | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("threads", "max_num_seqs", "prefill_chunk_size", "page_size", "dp", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected an integer >= 1")
        if self.split_min_tokens is not None and self.split_min_tokens < 1:
            raise ValueError(f"split_min_tokens = {self.split_min_tokens}: expected an integer >= 1")
        if not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens = {self.draft_tokens}: expected an integer in [0, {MAX_DRAFT_TOKENS}]")
        if self.num_pages is not None and self.num_pages < 2:
            raise ValueError(f"num_pages = {self.num_pages}: expected at least 2 (page 0 is reserved)")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len = {self.max_model_len}: expected an integer >= 2")
        self._check_placement()
        if self.dispatch_capacity is not None and self.dispatch_capacity < self.least_capacity:
            raise ValueError(
                f"dispatch_capacity = {self.dispatch_capacity}: {self.max_num_seqs} requests of 1 + {self.k} tokens "
                f"and one prompt token over tp = {self.tp} ranks need {self.least_capacity}; set it to that or more, "
                "or lower max_num_seqs"
            )

    def _check_placement(self) -> None:
        ranks = self.layout.ep
        if self.redundant_experts < 0:
            raise ValueError(f"redundant_experts = {self.redundant_experts}: expected an integer >= 0")
        if self.rebalance_steps is not None and self.rebalance_steps < 0:
            raise ValueError(f"rebalance_steps = {self.rebalance_steps}: expected an integer >= 0")
        if self.places_experts and ranks == 1:
            raise ValueError(
                f"redundant_experts = {self.redundant_experts}, rebalance_steps = {self.rebalance_steps}, "
                f"placement_file = {self.placement_file!r}: dp = 1, tp = 1 is one rank, which holds all experts"
            )
        if self.expert_source != "ranks" and not self.places_experts:
            raise ValueError(
                f"expert_source = {self.expert_source!r}: experts have fixed places; set redundant_experts, "
                "rebalance_steps or placement_file, or leave it out"
            )
        if self.ranks_per_node is not None and (self.ranks_per_node < 1 or ranks % self.ranks_per_node):
            raise ValueError(f"ranks_per_node = {self.ranks_per_node}: expected a divisor of dp * tp = {ranks}")

    @property
    def places_experts(self) -> bool:
        """Whether experts may have several places, or change them."""
        return self.redundant_experts > 0 or self.rebalance_steps is not None or self.placement_file is not None

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one host exchange through shared memory. Raises ValueError where they cannot."""
        on_cpu = self.device.startswith("cpu")
        if self.exchange in ("shared_memory", "sockets") and not on_cpu:
            raise ValueError(f"exchange = {self.exchange!r}: device = {self.device!r} needs torch")
        return on_cpu and self.exchange != "torch"

    @property
    def least_capacity(self) -> int:
        """Tokens a rank sends to the experts with a verify row in every slot, and one prompt token: where dummies may
        take the place of all verify rows, a prompt must still get on."""
        return -(-(padded_rows(self.max_num_seqs) * (1 + self.k) + 1) // self.tp)

    @property
    def capacity(self) -> int:
        """Most tokens that a rank sends to the experts at once."""
        if self.dispatch_capacity is not None:
            return self.dispatch_capacity
        return self.least_capacity + -(-self.prefill_chunk_size // self.tp)

    @property
    def plans_ahead(self) -> bool:
        return self.schedule == "ahead" or (self.schedule == "auto" and not self.device.startswith("cpu"))

    @property
    def layout(self) -> Layout:
        return Layout(dp=self.dp, tp=self.tp)

    @property
    def k(self) -> int:
        """Drafts per verify row; 0 when drafting is off."""
        return self.draft_tokens if self.draft_method != "off" else 0


MAX_DRAFT_TOKENS = 16


def padded_rows(num_verify: int) -> int:
    """Verify rows of a step with the dummies it may get: an even number, at least two."""
    return max(num_verify + num_verify % 2, 2)
