"""Random token ids or words.

Prompts never share their beginning by accident, neither within a run nor with an earlier one (a nonce
goes into the random numbers): a prefix cache finds in them only what `prefix_len` plants. Lengths depend
on the seed alone, so runs with one seed ask for the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from loadtest.datasets.lengths import Lengths
from loadtest.datasets.prompt import Conversation, Prompt, Turn
from loadtest.options import FIRST_RANDOM_TOKEN_ID

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Short, frequent words: one token each, with the space before it, in the usual English vocabularies.
COMMON_WORDS = (  # noqa: SIM905 - a list of 250 literals is no better to read
    "about above after again air all along also always and animal another answer any are around "
    "ask away back because been before began being below between big book both boy but call came "
    "can car change children city close cold come could country cut day did different does done door "
    "down each earth eat end enough even every example eye face family far father feet few find first "
    "follow food for form found four from game gave get girl give good great group grow had hand hard "
    "has have head hear help her here high him his home house how idea important into its just keep "
    "kind know land large last late learn leave left letter life light like line list little live long "
    "look made make man many mean men might mile more most mother move much must name near need never "
    "new next night now number off often old once one only open other our out over own page paper part "
    "people picture place plant play point put question quick read right river run said same saw say "
    "school sea second see seem sentence set she should show side small some song soon sound still stop "
    "story study such take talk tell than that the their them then there these they thing think this"
).split()


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Lengths in tokens, see `Lengths`; the prefix, which all prompts share, comes on top."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocab_size: int = 30_000
    input_cv: float | None = None
    output_cv: float | None = None
    max_input_len: int | None = None
    max_output_len: int | None = None

    def lengths(self, count: int, seed: int) -> tuple[list[int], list[int]]:
        """Of `count` prompts without the prefix, and of their answers."""
        rng = np.random.default_rng(seed)
        inputs = Lengths(self.input_len, self.range_ratio, self.input_cv, self.max_input_len)
        outputs = Lengths(self.output_len, self.range_ratio, self.output_cv, self.max_output_len)
        return inputs.draw(count, rng), outputs.draw(count, rng)


def random_token_prompts(
    num_prompts: int, shape: RandomShape, seed: int, nonce: Sequence[int]
) -> list[Prompt]:
    """Token ids in [1000, vocab_size), exactly as long as asked.

    The first token after the shared prefix differs between all prompts, as far as the ids go round.
    """
    input_lens, output_lens = shape.lengths(num_prompts, seed)
    rng = np.random.default_rng([seed, *nonce])
    num_ids = shape.vocab_size - FIRST_RANDOM_TOKEN_ID
    prefix = random_ids(shape.prefix_len, shape.vocab_size, rng).tolist()
    first_ids = rng.permutation(num_ids) + FIRST_RANDOM_TOKEN_ID
    prompts = []
    for index, (input_len, output_len) in enumerate(zip(input_lens, output_lens, strict=True)):
        ids = random_ids(input_len, shape.vocab_size, rng)
        ids[0] = first_ids[index % num_ids]
        prompts.append(Prompt(prefix + ids.tolist(), output_len))
    return prompts


def random_word_prompts(
    num_prompts: int, shape: RandomShape, seed: int, nonce: Sequence[int]
) -> list[Prompt]:
    """Text of as many common words as tokens are asked for: near the length, which usage then tells."""
    input_lens, output_lens = shape.lengths(num_prompts, seed)
    rng = np.random.default_rng([seed, *nonce])
    prefix = random_words(shape.prefix_len, rng)
    return [
        Prompt(" ".join(prefix + random_words(input_len, rng)), output_len)
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


def random_conversations(
    num_conversations: int,
    num_turns: int,
    shape: RandomShape,
    mean_think_time_s: float,
    seed: int,
    nonce: Sequence[int],
) -> list[Conversation]:
    """Conversations of words; the prefix is their system prompt. Thinking takes an exponential time."""
    input_lens, output_lens = shape.lengths(num_conversations * num_turns, seed)
    rng = np.random.default_rng([seed, *nonce])
    system = " ".join(random_words(shape.prefix_len, rng))
    think_times_s = rng.exponential(mean_think_time_s, size=len(input_lens)).tolist()
    turns = [
        Turn(" ".join(random_words(input_len, rng)), output_len, think_time_s)
        for input_len, output_len, think_time_s in zip(input_lens, output_lens, think_times_s, strict=True)
    ]
    return [
        Conversation(tuple(turns[begin : begin + num_turns]), system)
        for begin in range(0, len(turns), num_turns)
    ]


def random_ids(count: int, vocab_size: int, rng: np.random.Generator) -> NDArray[Any]:
    """Token ids in [1000, vocab_size)."""
    return rng.integers(vocab_size - FIRST_RANDOM_TOKEN_ID, size=count) + FIRST_RANDOM_TOKEN_ID


def random_words(count: int, rng: np.random.Generator) -> list[str]:
    return [COMMON_WORDS[index] for index in rng.integers(len(COMMON_WORDS), size=count)]
