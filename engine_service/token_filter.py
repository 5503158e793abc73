"""min_p, top_k and top_p: which tokens may be drawn at all. Without a sort: kernels/cpu/candidates.h."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.sampling_metadata import Draw


def allowed_tokens(weights: Tensor, draw: Draw) -> Tensor | None:
    """Ids of the tokens that pass all filters of a row, in no particular order; None if no filter is on.

    weights: float32 `[vocab]`, exp((logit - largest logit) / temperature). Each filter looks at what the
    ones before it left. Equal weights: top_k keeps all that tie with its last one; top_p prefers
    lower ids. At least one token always stays.
    """
    vocab_size = weights.shape[0]
    has_top_k = 0 < draw.top_k < vocab_size
    if draw.min_p <= 0.0 and not has_top_k and draw.top_p >= 1.0:
        return None
    threshold = draw.min_p  # the largest weight is 1
    if has_top_k:
        threshold = max(threshold, _kth_largest(weights, draw.top_k))
    if draw.top_p >= 1.0:
        return (weights >= threshold).nonzero().squeeze(-1)
    kept = torch.where(weights >= threshold, weights, 0.0) if threshold > 0.0 else weights
    return _nucleus(kept, draw.top_p)


def _kth_largest(weights: Tensor, k: int) -> float:
    values = weights.cpu().numpy()  # numpy's selection is several times faster than torch's topk
    return float(np.partition(values, -k)[-k])


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """The fewest tokens whose share reaches top_p (Holtzman et al. 2020, arXiv 1904.09751).

    A token stays if the share of those ranked before it is below top_p.
    """
    total = float(weights.sum(dtype=torch.float64))
    # Only a few tokens need to be ranked. Those below this floor have at most (1 - top_p) / 2 of the
    # total between them, however many they are, so the rest always reaches top_p.
    floor = (1.0 - top_p) * total / (2 * weights.shape[0])
    ids = (weights >= floor).nonzero().squeeze(-1)  # ascending, so that the sort ranks equals by id
    ranked, order = weights[ids].sort(descending=True, stable=True)
    shares = ranked.double()
    before = shares.cumsum(-1) - shares
    return ids[order[before < top_p * total]]
