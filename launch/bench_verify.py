"""`lockstep bench verify`: the two assumptions that speculation rests on, on the user's own model and prompts.

One: a target pass over 1 + k tokens a row costs little more than one over a single token. Two: drafts are accepted.
Their quotient bounds the gain from above, since the drafter's own time comes on top.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from launch.config import DraftSection, LaunchConfig
from launch.generate import GenerateOptions, prepare
from launch.outcome import Outcome, acceptance_per_position
from launch.printers import complain
from launch.prompts import merge_sampling
from runtime.attention.meta import AttentionMeta, DecodeGroup

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.executor import TargetModel
    from runtime.request import GenerateRequest

BATCHES = (1, 8, 32)
MAX_TOKENS_PER_ROW = 8
PAGE_SIZE = 16
MIN_ROUNDS, SECONDS_PER_BATCH = 3, 3.0  # the first round is warm-up and does not count


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Sizes in tokens; `draft_tokens=None` is 3, or 0 for a model without an MTP layer."""

    prompts_file: str | None = None
    draft_tokens: int | None = None
    max_tokens: int = 64
    context: int = 128


def measure(config: LaunchConfig, options: VerifyOptions) -> dict[str, Any]:
    """Pass times in ms by batch and tokens a row, acceptance by draft position, and the gain they allow."""
    from runtime.engine import Engine
    from runtime.loading import load_model
    from runtime.models.config import load_model_config

    flags = {"max_tokens": options.max_tokens, "ignore_eos": True}
    merge_sampling([flags])  # a wrong flag is refused before anything is loaded
    model = load_model_config(Path(config.model.path))
    most = model.max_position_embeddings - MAX_TOKENS_PER_ROW
    if not 1 <= options.context <= most:
        raise ValueError(f"context = {options.context}: expected 1..{most} (the model's limit less what is verified)")
    tokens = options.draft_tokens if options.draft_tokens is not None else 3 * bool(model.num_mtp_layers)
    draft = DraftSection(method="mtp" if tokens else "off", tokens=tokens)
    config = config.model_copy(update={"draft": draft})
    outcomes, requests = prepare(GenerateOptions(prompts_file=options.prompts_file, flags=flags), config)
    engine_config = config.engine_config()
    loaded = load_model(engine_config)
    engine = Engine(engine_config, loaded)
    try:
        passes = _pass_times(loaded.model, model.vocab_size, loaded.device, options.context)
        accepted = _acceptance(engine, outcomes, requests) if tokens else []
    finally:
        engine.close()
    return {
        "model": engine_config.model.name,
        "device": engine_config.device,
        "storage": engine_config.storage,
        "threads": engine_config.threads,
        "context": options.context,
        "num_prompts": len(requests),
        "draft_tokens": tokens,
        "pass_ms": {str(batch): times for batch, times in passes.items()},
        "acceptance_per_position": accepted,
        "gain_bound": {str(batch): _gain_bound(times, accepted) for batch, times in passes.items()},
    }


def render(figures: Mapping[str, Any]) -> str:
    """The figures as two small tables."""
    header = "".join(f"{n:>9}" for n in range(1, MAX_TOKENS_PER_ROW + 1))
    lines = [
        f"{figures['model']} on {figures['device']}, storage {figures['storage']}, {figures['threads']} thread(s), "
        f"{figures['context']} tokens of context",
        "",
        f"target pass, ms{'tokens a row':>15}{header}",
    ]
    for batch, times in figures["pass_ms"].items():
        lines.append(f"{f'batch {batch}':<30}" + "".join(f"{t:>9.2f}" for t in times))
        lines.append(f"{'  against one token':<30}" + "".join(f"{t / times[0]:>9.2f}" for t in times))
    accepted = figures["acceptance_per_position"]
    if not accepted:
        return "\n".join([*lines, "", "no drafts: the model has no MTP layer, or --draft-tokens is 0"])
    positions = "".join(f"{i + 1:>9}" for i in range(len(accepted)))
    lines += ["", f"over {figures['num_prompts']} prompts{'drafts':>18}{positions}"]
    lines.append(f"{'accepted up to here, share':<30}" + "".join(f"{share:>9.3f}" for share in accepted))
    for batch, gains in figures["gain_bound"].items():
        lines.append(f"{f'gain at most, batch {batch}':<30}" + "".join(f"{gain:>9.2f}" for gain in gains))
    lines.append("(gain: tokens a step against the longer target pass; the drafter's own time is not in it)")
    return "\n".join(lines)


def _gain_bound(times: Sequence[float], accepted: Sequence[float]) -> list[float]:
    """For k = 1, 2, ...: (1 + accepted drafts a step) / (time of 1 + k tokens against one)."""
    longest = min(len(accepted), len(times) - 1)
    return [round((1 + sum(accepted[:k])) * times[0] / times[k], 3) for k in range(1, longest + 1)]


@torch.inference_mode()
def _pass_times(model: TargetModel, vocab_size: int, device: torch.device, context: int) -> dict[int, list[float]]:
    """Median ms of a pass by batch, for 1, 2, ... tokens a row. Lengths take turns, so that all see the same noise."""
    pages_per_row = -(-(context + MAX_TOKENS_PER_ROW) // PAGE_SIZE)
    kv = model.allocate_kv(1 + max(BATCHES) * pages_per_row, PAGE_SIZE)
    random = torch.Generator().manual_seed(0)
    times: dict[int, list[float]] = {}
    for batch in BATCHES:
        lengths = range(1, MAX_TOKENS_PER_ROW + 1)
        inputs = [torch.randint(vocab_size, (batch * n,), generator=random).to(device) for n in lengths]
        metas = [_meta(batch, n, context, pages_per_row, device) for n in lengths]
        rounds: list[list[float]] = []
        deadline = time.perf_counter() + SECONDS_PER_BATCH
        while len(rounds) < 1 + MIN_ROUNDS or time.perf_counter() < deadline:
            rounds.append([_time_pass(model, ids, meta, kv) for ids, meta in zip(inputs, metas, strict=True)])
        times[batch] = [round(statistics.median(column), 3) for column in zip(*rounds[1:], strict=True)]
    return times


def _time_pass(model: TargetModel, token_ids: torch.Tensor, meta: AttentionMeta, kv: list[torch.Tensor]) -> float:
    """ms of a pass with the logits of all its tokens, which acceptance needs."""
    start = time.perf_counter()
    logits = model.logits(model.forward(token_ids, (meta,), kv))
    if logits.is_cuda:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def _meta(batch: int, q_len: int, context: int, pages_per_row: int, device: torch.device) -> AttentionMeta:
    """Rows of `q_len` tokens behind `context` positions each, on pages of their own (page 0 is reserved)."""
    table = 1 + torch.arange(batch * pages_per_row).view(batch, pages_per_row)
    positions = context + torch.arange(q_len)  # [q_len]
    writes = table[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE  # [batch, q_len]
    hidden = torch.arange(pages_per_row * PAGE_SIZE) > positions.unsqueeze(1)  # [q_len, pages_per_row * PAGE_SIZE]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).expand(batch, -1, -1).contiguous()
    return AttentionMeta(
        num_tokens=batch * q_len,
        positions=positions.repeat(batch).to(device),
        write_index=writes.flatten().to(device),
        decode=DecodeGroup(num_rows=batch, q_len=q_len, page_table=table.to(device), mask=mask.to(device)),
        prefill=(),
    )


def _acceptance(engine: Engine, outcomes: Sequence[Outcome], requests: Mapping[str, GenerateRequest]) -> list[float]:
    """Share of verify steps that accepted the first, second, ... draft, over the prompts that could run."""
    for outcome in outcomes:
        if outcome.error is not None:
            complain(f"prompt {outcome.row.id}: {outcome.error}")
    for request in requests.values():
        try:
            engine.submit(request)
        except ValueError as error:
            complain(f"prompt {outcomes[int(request.request_id)].row.id}: {error}")
    stats = []
    while engine.has_work():
        for chunk in engine.step():
            if chunk.error is not None:
                raise RuntimeError(f"prompt {outcomes[int(chunk.request_id)].row.id}: {chunk.error}")
            if chunk.stats is not None:
                stats.append(chunk.stats)
    if not stats:
        raise ValueError("no prompt could run")
    return acceptance_per_position(stats)
