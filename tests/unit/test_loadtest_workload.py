"""Prompts: exact lengths, no prefix in common but the planted one, custom files read line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.datasets.custom import custom_items
from loadtest.datasets.random_prompts import RandomShape, random_token_prompts, random_word_prompts
from shared.errors import ConfigError

SHAPE = RandomShape(input_len=32, output_len=8)


def test_random_prompts_are_as_long_as_asked_and_differ_from_the_first_token_on() -> None:
    prompts = random_token_prompts(2000, SHAPE, seed=0, nonce=[1])
    assert {len(prompt.content) for prompt in prompts} == {32}
    assert {prompt.num_output_tokens for prompt in prompts} == {8}
    assert len({prompt.content[0] for prompt in prompts}) == 2000
    ids = [token_id for prompt in prompts for token_id in prompt.content]
    assert min(ids) >= 1000
    assert max(ids) < 30_000


def test_another_nonce_gives_other_prompts_of_the_same_lengths() -> None:
    shape = RandomShape(input_len=50, output_len=20, range_ratio=0.5)
    first = random_token_prompts(40, shape, seed=3, nonce=[1])
    second = random_token_prompts(40, shape, seed=3, nonce=[2])
    again = random_token_prompts(40, shape, seed=3, nonce=[1])
    assert first == again
    assert [prompt.num_tokens for prompt in first] == [prompt.num_tokens for prompt in second]
    assert all(a.content[:4] != b.content[:4] for a, b in zip(first, second, strict=True))


def test_lengths_stay_within_the_range_ratio() -> None:
    shape = RandomShape(input_len=100, output_len=10, range_ratio=0.2)
    prompts = random_token_prompts(500, shape, seed=1, nonce=[0])
    lengths = {prompt.num_tokens for prompt in prompts}
    assert min(lengths) == 80
    assert max(lengths) == 120
    assert {prompt.num_output_tokens for prompt in prompts} == {8, 9, 10, 11, 12}


def test_only_the_planted_prefix_is_shared() -> None:
    prompts = random_token_prompts(20, RandomShape(16, 4, prefix_len=48), seed=0, nonce=[5])
    assert {tuple(prompt.content[:48]) for prompt in prompts} == {tuple(prompts[0].content[:48])}
    assert {len(prompt.content) for prompt in prompts} == {64}
    assert len({prompt.content[48] for prompt in prompts}) == 20


def test_words_are_counted_like_tokens_and_their_true_length_is_left_to_the_server() -> None:
    prompts = random_word_prompts(5, SHAPE, seed=0, nonce=[1])
    assert [len(prompt.content.split()) for prompt in prompts] == [32] * 5
    assert {prompt.num_tokens for prompt in prompts} == {None}


def test_custom_file_gives_prompts_and_output_lengths_and_is_repeated_when_short(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "output_tokens": 5}\n\n{"prompt": [7, 8, 9], "x": 1}\n')
    prompts = custom_items(path, 3, default_output_len=99, takes_ids=True)
    assert [(prompt.content, prompt.num_output_tokens) for prompt in prompts] == [
        ("one", 5),
        ([7, 8, 9], 99),
        ("one", 5),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": 5}', "line 2"),
        ("not json", "line 2"),
        ('{"prompt": [1]}', "line 2: chat takes text"),
        ('{"prompt": "x", "output_tokens": 0}', "line 2: empty"),
    ],
)
def test_bad_line_of_a_custom_file_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=complaint) as raised:
        custom_items(path, 2, default_output_len=1, takes_ids=False)
    assert raised.value.param == "--dataset-path"
