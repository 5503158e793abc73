"""A mixture of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538) in the place of an MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine_service.models.spec import ExpertsSpec
from engine_service.models.weights import ExpertWeights


def mixture_of_experts(
    x: Tensor, weights: ExpertWeights, spec: ExpertsSpec, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """`[num_tokens, hidden]` to the same: each token through the experts with its largest router scores.

    `gate` turns `[n, 2 * intermediate]` into `[n, intermediate]`. Experts that no token chose cost nothing.
    """
    shares = linear(x, weights.router).float().softmax(-1)
    shares, chosen = shares.topk(spec.num_experts_per_token, dim=-1)  # [num_tokens, num_experts_per_token]
    if spec.normalises_weights:
        shares = shares / shares.sum(-1, keepdim=True)
    output = torch.zeros_like(x)
    for expert in torch.unique(chosen).tolist():
        tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
        transformed = linear(gate(linear(x[tokens], weights.gate_up[expert])), weights.down[expert])
        output.index_add_(0, tokens, (transformed * shares[tokens, ranks, None]).to(output.dtype))
    return output
