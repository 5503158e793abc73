"""transformers' own greedy continuation of a prompt alone, and how near the runner-up was at each token.

Generating token by token with transformers takes minutes for 32 prompts. The same is known from one
forward pass over prompt and output: token i is right if its logit is the largest after the prompt and
output[:i], and by induction the whole output is then what generation gives. `generate_alone` does it the
literal way, for a few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TIE = 1e-4  # of logits: nearer than this, the order of a float32 sum decides
_BATCH = 8


@dataclass(frozen=True)
class Reference:
    prompt: list[int]
    output: list[int]
    gaps: list[float]  # between the two largest logits, for each token of `output`

    def parts_at_a_tie(self, output: list[int]) -> bool:
        """Whether `output` differs; fails unless the first difference is where two logits tie."""
        if output == self.output:
            return False
        shorter = min(len(output), len(self.output))
        at = next((i for i in range(shorter) if output[i] != self.output[i]), shorter)
        assert at < len(self.gaps), f"{len(output)} tokens instead of {len(self.output)}"
        assert self.gaps[at] < TIE, (
            f"token {at} is {output[at : at + 1]}, not {self.output[at]}; the gap is {self.gaps[at]}"
        )
        return True


@torch.inference_mode()
def verified(model: Any, prompts: list[list[int]], outputs: list[list[int]]) -> list[Reference]:
    """The outputs as references, after transformers has confirmed each of their tokens (up to ties)."""
    texts = [prompt + output[:-1] for prompt, output in zip(prompts, outputs, strict=True)]
    references = {}
    # Some at a time, which is quicker, and those of like lengths. What is behind a text does not change it.
    by_length = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    for numbers in (by_length[at : at + _BATCH] for at in range(0, len(texts), _BATCH)):
        width = len(texts[numbers[-1]])
        padded = torch.tensor([texts[number] + [0] * (width - len(texts[number])) for number in numbers])
        for number, logits in zip(numbers, model(padded).logits, strict=True):
            prompt, output = prompts[number], outputs[number]
            references[number] = _confirmed(prompt, output, logits[len(prompt) - 1 : len(texts[number])])
    return [references[number] for number in range(len(texts))]


def _confirmed(prompt: list[int], output: list[int], logits: torch.Tensor) -> Reference:
    """`logits`: one row for each token of the output, [num_tokens, vocab_size]."""
    top_two = logits.topk(2).values
    chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    behind = top_two[:, 0] - chosen
    for at in (behind >= TIE).nonzero().flatten().tolist():
        raise AssertionError(f"token {at} is {float(behind[at])} behind the largest logit")
    return Reference(prompt, output, (top_two[:, 0] - top_two[:, 1]).tolist())


@torch.inference_mode()
def generate_alone(model: Any, prompt: list[int], max_tokens: int, eos_token_ids: list[int]) -> list[int]:
    """transformers' own greedy generation, token by token."""
    tokens = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=eos_token_ids,
        pad_token_id=eos_token_ids[0],
    )
    output: list[int] = tokens[0, len(prompt) :].tolist()
    return output
