"""What is sent: prompts and the lengths of their answers.

Random prompts never share their beginning by accident, neither within a run nor with an earlier one
(a nonce goes into the random numbers): a prefix cache finds in them only what `prefix_len` plants.
Lengths depend on the seed alone, so runs with one seed ask for the same work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from loadtest.options import FIRST_RANDOM_TOKEN_ID
from shared.errors import ConfigError

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
class Prompt:
    """One request to be made. Token ids only for backends that take them."""

    content: str | list[int]
    num_output_tokens: int

    @property
    def num_tokens(self) -> int | None:
        """Length in the server's own tokens; None for text, which only the server can count."""
        return len(self.content) if isinstance(self.content, list) else None


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Lengths are uniform in [n * (1 - range_ratio), n * (1 + range_ratio)]; the prefix comes on top."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocab_size: int = 30_000


def random_token_prompts(
    num_prompts: int, shape: RandomShape, seed: int, nonce: Sequence[int]
) -> list[Prompt]:
    """Token ids in [1000, vocab_size), exactly as long as asked.

    The first token after the shared prefix differs between all prompts, as far as the ids go round.
    """
    input_lens, output_lens = _lengths(num_prompts, shape, seed)
    rng = np.random.default_rng([seed, *nonce])
    num_ids = shape.vocab_size - FIRST_RANDOM_TOKEN_ID
    prefix: list[int] = (rng.integers(num_ids, size=shape.prefix_len) + FIRST_RANDOM_TOKEN_ID).tolist()
    first_ids = rng.permutation(num_ids)
    prompts = []
    for index, (input_len, output_len) in enumerate(zip(input_lens, output_lens, strict=True)):
        ids = rng.integers(num_ids, size=input_len)
        ids[0] = first_ids[index % num_ids]
        prompts.append(Prompt(prefix + (ids + FIRST_RANDOM_TOKEN_ID).tolist(), output_len))
    return prompts


def random_word_prompts(
    num_prompts: int, shape: RandomShape, seed: int, nonce: Sequence[int]
) -> list[Prompt]:
    """Text of as many common words as tokens are asked for: near the length, which usage then tells."""
    input_lens, output_lens = _lengths(num_prompts, shape, seed)
    rng = np.random.default_rng([seed, *nonce])

    def words(count: int) -> list[str]:
        return [COMMON_WORDS[index] for index in rng.integers(len(COMMON_WORDS), size=count)]

    prefix = words(shape.prefix_len)
    return [
        Prompt(" ".join(prefix + words(input_len)), output_len)
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


class CustomLine(msgspec.Struct, frozen=True):
    """A line of a custom data set; other fields are ignored, as vLLM does."""

    prompt: str | list[int]
    output_tokens: int | None = None


def custom_prompts(path: Path, num_prompts: int, default_output_len: int, takes_ids: bool) -> list[Prompt]:
    """The first `num_prompts` lines of a JSONL file; a shorter file is gone through again.

    Raises ConfigError that names the line.
    """
    prompts: list[Prompt] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "--dataset-path") from error
    for number, line in enumerate(lines, start=1):
        if len(prompts) == num_prompts:
            break
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=CustomLine)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: {error}", "--dataset-path") from error
        if isinstance(entry.prompt, list) and not takes_ids:
            raise ConfigError(f"{path}, line {number}: chat takes text, not token ids", "--dataset-path")
        output_len = default_output_len if entry.output_tokens is None else entry.output_tokens
        if not entry.prompt or output_len < 1:
            raise ConfigError(f"{path}, line {number}: empty prompt or answer", "--dataset-path")
        prompts.append(Prompt(entry.prompt, output_len))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts", "--dataset-path")
    return list(itertools.islice(itertools.cycle(prompts), num_prompts))


def _lengths(num_prompts: int, shape: RandomShape, seed: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(seed)

    def around(length: int) -> list[int]:
        low = max(1, math.floor(length * (1 - shape.range_ratio)))
        high = math.ceil(length * (1 + shape.range_ratio))
        drawn: list[int] = rng.integers(low, high, size=num_prompts, endpoint=True).tolist()
        return drawn

    return around(shape.input_len), around(shape.output_len)
