"""A JSONL file of one's own: vLLM's form, and more."""

from __future__ import annotations

import codecs
import itertools
from pathlib import Path

import msgspec
import numpy as np

from loadtest.datasets.prompt import Conversation, Item, Prompt, Turn
from shared.errors import ConfigError


class CustomLine(msgspec.Struct, frozen=True):
    """A line of a custom data set; other fields are ignored, as vLLM does.

    Either `prompt`, or `turns`, which make a conversation.
    """

    prompt: str | list[int] | None = None
    turns: list[str] = []
    system: str = ""  # of a conversation
    output_tokens: int | None = None
    tenant: str = ""
    model: str | None = None
    headers: dict[str, str] = {}


def custom_items(
    path: Path,
    num_items: int,
    default_output_len: int,
    *,
    takes_ids: bool,
    mean_think_time_s: float = 0.0,
    repeats: bool = True,
    seed: int = 0,
) -> list[Item]:
    """The first `num_items` lines of a JSONL file; a shorter file is gone through again, if it `repeats`.

    Raises ConfigError that names the line.
    """
    items: list[Item] = []
    rng = np.random.default_rng(seed)
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "--dataset-path") from error
    for number, line in enumerate(lines, start=1):
        if len(items) == num_items:
            break
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=CustomLine)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}", "--dataset-path") from error
        complaint = _complaint(entry, takes_ids)
        output_len = default_output_len if entry.output_tokens is None else entry.output_tokens
        if complaint is None and output_len < 1:
            complaint = "empty prompt or answer"
        if complaint is not None:
            raise ConfigError(f"{path}, line {number}: {complaint}", "--dataset-path")
        headers = tuple(entry.headers.items())
        if entry.prompt is not None:
            items.append(Prompt(entry.prompt, output_len, entry.tenant, entry.model, headers))
        else:
            turns = (
                Turn(text, output_len, float(rng.exponential(mean_think_time_s))) for text in entry.turns
            )
            items.append(Conversation(tuple(turns), entry.system, entry.tenant, entry.model, headers))
    if not items:
        raise ConfigError(f"{path} holds no prompts", "--dataset-path")
    return list(itertools.islice(itertools.cycle(items), num_items)) if repeats else items


def _complaint(entry: CustomLine, takes_ids: bool) -> str | None:
    if (entry.prompt is None) == (not entry.turns):
        return "has neither `prompt` nor `turns`, or both"
    if isinstance(entry.prompt, list) and not takes_ids:
        return "chat takes text, not token ids"
    if entry.prompt is not None and not entry.prompt:
        return "empty prompt or answer"
    return None
