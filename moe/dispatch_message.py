"""One message a dispatch: a row holds a token's hidden values, routing weights and expert ids, all as float32 words."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.dispatch_protocol import Dispatched
from moe.router import Routing


def pack(hidden: Tensor, routing: Routing) -> Tensor:
    """hidden: [num_tokens, hidden_size] float32 -> [num_tokens, hidden_size + 2 * top_k] float32.

    Expert ids, counted from 1, keep their int32 bits, so that one collective moves everything and rows of zeros are
    tokens for no expert. Nothing may compute on them.
    """
    ids = (routing.expert_ids + 1).to(torch.int32).view(torch.float32)  # [num_tokens, top_k]
    return torch.cat((hidden, routing.weights, ids), 1)


def unpack(message: Tensor, top_k: int, first_expert: int, num_local_experts: int) -> Dispatched:
    """Rows of `pack`, seen by the rank that holds experts `first_expert .. first_expert + num_local_experts - 1`.

    Routes to other ranks' experts become routes to none, with weight 0.
    """
    hidden_size = message.shape[1] - 2 * top_k
    weights = message[:, hidden_size : hidden_size + top_k]
    ids = message[:, hidden_size + top_k :].view(torch.int32).to(torch.int64)
    local = ids - (1 + first_expert)  # [num_received, top_k]
    elsewhere = (local < 0) | (local >= num_local_experts)
    routing = Routing(local.masked_fill_(elsewhere, num_local_experts), weights.masked_fill(elsewhere, 0.0))
    return Dispatched(message[:, :hidden_size], routing)
