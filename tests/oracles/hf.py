"""transformers as the oracle of whole generations, and the rule by which ids may differ from it.

The oracle is run once over prompt and output: where every output token is the oracle's choice after the tokens before
it, the output is the oracle's generation. Up to the first difference that is the same comparison as generating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mtp.accept import DrawKeys, Method
from mtp.noise import Purpose, gumbel
from runtime.request import SamplingParams
from runtime.sampling import process
from runtime.sampling_params import encode_params
from runtime.sampling_tables import SamplingTable

MAX_MARGIN = 2e-4
MAX_EXPERT_GAP = 1e-5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first position where an output leaves the oracle's."""

    index: int  # in the output
    chosen: int
    expected: int
    margin: float  # the oracle's best score minus its second best there
    expert_gap: float  # smallest gap between a chosen and an unchosen expert or group, up to there

    @property
    def allowed(self) -> bool:
        return self.margin <= MAX_MARGIN or self.expert_gap <= MAX_EXPERT_GAP


class HfOracle:
    """A DeepSeek-V3-format model in transformers, float32, eager attention."""

    def __init__(self, model: Path) -> None:
        transformers.logging.set_verbosity_error()  # it lists the MTP layer as unexpected
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._cache: dict[tuple[tuple[int, ...], tuple[int, ...], str], Difference | None] = {}

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), V]."""
        result: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return result

    def check(
        self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams | None = None
    ) -> Difference | None:
        """The first difference of `output` from the oracle's continuation of `prompt`; None when there is none.

        With `sampling` (a seed and no penalties, bias or min_tokens) the continuation is plain seeded decoding.
        """
        key = (tuple(prompt), tuple(output), repr(sampling))
        if key not in self._cache:
            self._cache[key] = self._check(prompt, output, sampling)
        return self._cache[key]

    @torch.inference_mode()
    def _check(
        self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams | None
    ) -> Difference | None:
        scores = self.logits([*prompt, *output[:-1]])[len(prompt) - 1 :]
        if sampling is not None and sampling.temperature > 0:
            scores = _perturbed(scores, sampling, len(prompt))
        expected = scores.argmax(-1)
        wrong = (expected != torch.tensor(list(output))).nonzero().flatten().tolist()
        if not wrong:
            return None
        index = wrong[0]
        best = scores[index].topk(2).values
        return Difference(
            index=index, chosen=output[index], expected=int(expected[index]), margin=float(best[0] - best[1]),
            expert_gap=self._expert_gap([*prompt, *output[:index]]),
        )

    def _expert_gap(self, token_ids: Sequence[int]) -> float:
        gaps: list[float] = []
        hooks = [
            module.register_forward_hook(lambda m, args, _: gaps.append(_router_gap(m, args[0])))
            for module in self.model.modules()
            if type(module).__name__ == "DeepseekV3TopkRouter"
        ]
        self.logits(token_ids)
        for hook in hooks:
            hook.remove()
        return min(gaps, default=float("inf"))


def _perturbed(logits: Tensor, sampling: SamplingParams, prompt_len: int) -> Tensor:
    """Processed logits plus the noise of plain seeded decoding: each row's arg-max is the token drawn there."""
    assert sampling.seed is not None
    params = encode_params(sampling, prompt_len=prompt_len, default_seed=0, eos_token_ids=())
    table = SamplingTable(2, "cpu")
    table.write(np.array([1]), params)
    count = len(logits)
    rows = table.gather(torch.ones(count, dtype=torch.int64), np.ones(count, np.int64))
    positions = prompt_len + torch.arange(count)
    processed = process(logits.unsqueeze(1), rows, positions).squeeze(1)
    keys: DrawKeys = rows.keys
    assert int(keys.method[0]) == Method.COUPLED
    return processed + gumbel(keys.seeds, keys.choices, positions, Purpose.TARGET, logits.shape[1])


def _router_gap(router: nn.Module, hidden: Tensor) -> float:
    """Smallest distance of any token from another choice of groups, or of experts within the chosen groups."""
    hidden = hidden.reshape(-1, router.hidden_dim).float()
    choice = torch.nn.functional.linear(hidden, router.weight.float()).sigmoid() + router.e_score_correction_bias
    groups = choice.view(len(choice), router.num_group, -1)
    group_scores = groups.topk(2, dim=-1).values.sum(-1)
    ranked = group_scores.sort(dim=-1, descending=True)
    gap = float("inf")
    if router.topk_group < router.num_group:
        edge = ranked.values[:, router.topk_group - 1] - ranked.values[:, router.topk_group]
        gap = float(edge.min())
    kept = torch.zeros_like(group_scores).scatter_(1, ranked.indices[:, : router.topk_group], 1.0).bool()
    within = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1).sort(dim=-1, descending=True).values
    edge = within[:, router.top_k - 1] - within[:, router.top_k]
    return min(gap, float(edge.min()))
