"""What a generation is expected to take of its tenant's limits, and what it may not ask for."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.generation import GenerationPlan
from gateway.limits import Demand
from gateway.limits.dimensions import Dimensions
from gateway.limits.refusal import prompt_too_long


def demand_of(plan: GenerationPlan) -> Demand:
    beam_search = plan.sampling.beam_search
    num_choices = plan.num_choices if beam_search is None else max(plan.num_choices, beam_search.width)
    return Demand(
        input_tokens=sum(len(prompt.token_ids) for prompt in plan.prompts),
        num_choices=len(plan.prompts) * num_choices,
        max_tokens=plan.sampling.max_tokens,
    )


def check_prompt_length(lengths: Sequence[int], limits: Dimensions, param: str) -> None:
    """Raises ApiError 400 for prompts that are together longer than one request may have."""
    bound = limits.max_prompt
    if bound is not None and sum(lengths) > bound.num_tokens:
        raise prompt_too_long(sum(lengths), bound, param)
