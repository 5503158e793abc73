"""Data sets: lengths, shared prefixes, files of other tools, conversations, tenants, nonces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.datasets.custom import custom_items
from loadtest.datasets.lengths import Lengths
from loadtest.datasets.prefix_repetition import PrefixRepetition, prefix_repetition_prompts
from loadtest.datasets.prompt import Conversation, Prompt, Turn, num_distinct_requests, num_requests
from loadtest.datasets.sharegpt import read_sharegpt, sharegpt_items
from loadtest.datasets.tenants import read_tenants, with_tenants
from loadtest.datasets.text_slices import TOKENS_PER_WORD, text_slice_prompts
from loadtest.options import BenchServeOptions
from loadtest.workload import build_workload
from shared.errors import ConfigError


def test_lognormal_lengths_have_the_mean_and_variation_asked_for() -> None:
    lengths = Lengths(600, cv=0.8).draw(20_000, np.random.default_rng(1))
    assert np.mean(lengths) == pytest.approx(600, rel=0.03)
    assert np.std(lengths) / np.mean(lengths) == pytest.approx(0.8, rel=0.05)
    assert min(lengths) >= 1
    cut = Lengths(600, cv=0.8, highest=900).draw(20_000, np.random.default_rng(1))
    assert max(cut) == 900
    assert cut == [min(length, 900) for length in lengths]


@pytest.mark.parametrize("takes_ids", [True, False])
def test_repeated_prefixes_are_the_only_beginnings_and_come_equally_often(takes_ids: bool) -> None:
    shape = PrefixRepetition(prefix_len=6, suffix_len=4, num_prefixes=3, output_len=9)
    prompts = prefix_repetition_prompts(20, shape, takes_ids, seed=1, nonce=[2])
    pieces = [
        prompt.content if isinstance(prompt.content, list) else prompt.content.split() for prompt in prompts
    ]
    assert {len(piece) for piece in pieces} == {10}
    beginnings = [tuple(piece[:6]) for piece in pieces]
    assert sorted(beginnings.count(one) for one in set(beginnings)) == [6, 7, 7]
    assert len({tuple(piece) for piece in pieces}) == 20
    assert beginnings[:3] != beginnings[3:6] or beginnings[:6] != beginnings[6:12]  # not in turn
    assert shape.hit_share(20) == pytest.approx(17 * 6 / 200)


def test_slices_of_a_text_begin_at_different_words_and_go_round_its_end(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"w{index}" for index in range(50)))
    prompts = text_slice_prompts(path, 50, Lengths(26), Lengths(5), seed=0, nonce=[1])
    starts = [str(prompt.content).split()[0] for prompt in prompts]
    assert len(set(starts)) == 50
    assert {len(str(prompt.content).split()) for prompt in prompts} == {round(26 / TOKENS_PER_WORD)}
    wrapped = next(str(prompt.content) for prompt in prompts if str(prompt.content).startswith("w49"))
    assert wrapped.startswith("w49 w0 w1 ")
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="no text"):
        text_slice_prompts(path, 1, Lengths(4), Lengths(4), 0, [1])


def conversation(*values: str, first: str = "human") -> dict[str, Any]:
    speakers = ("human", "gpt") if first == "human" else ("gpt", "human")
    turns = [{"from": speakers[index % 2], "value": value} for index, value in enumerate(values)]
    return {"id": "x", "conversations": turns}


LONG = "word " * 20  # 100 characters: 25 tokens or so


@pytest.fixture
def sharegpt_file(tmp_path: Path) -> Path:
    entries = [
        conversation(f"a {LONG}", LONG, f"b {LONG}", LONG * 2),
        conversation("hi", "hello"),  # too short
        conversation(LONG, LONG, first="gpt"),  # does not begin with a person
        conversation(f"c {LONG}", LONG, "d"),  # whose last word has no answer
        conversation(f"e {LONG} ü", LONG),
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(entries, indent=2, ensure_ascii=False), encoding="utf-8")
    return path


def test_first_prompts_of_conversations_ask_for_answers_as_long_as_the_file_has(sharegpt_file: Path) -> None:
    items = sharegpt_items(sharegpt_file, 3, is_shuffled=False)
    assert [str(item.content)[0] for item in items if isinstance(item, Prompt)] == ["a", "c", "e"]
    assert {item.num_output_tokens for item in items if isinstance(item, Prompt)} == {25}
    shuffled = sharegpt_items(sharegpt_file, 3, output_len=7, seed=3)
    assert {str(item.content)[0] for item in shuffled if isinstance(item, Prompt)} == {"a", "c", "e"}
    assert {item.num_output_tokens for item in shuffled if isinstance(item, Prompt)} == {7}


def test_file_that_is_cut_off_gives_what_is_whole_wherever_it_was_cut(sharegpt_file: Path) -> None:
    whole = sharegpt_file.read_bytes()
    counts = []
    for size in (*range(1, len(whole), 23), len(whole) - 2):
        sharegpt_file.write_bytes(whole[:size])
        counts.append(len(read_sharegpt(sharegpt_file)))
    assert counts == sorted(counts)  # no cut loses what came before it
    assert set(counts) == {0, 1, 2, 3, 4}
    sharegpt_file.write_bytes(whole[:200])
    with pytest.raises(ConfigError, match="holds no conversation"):
        sharegpt_items(sharegpt_file, 1)
    sharegpt_file.write_text('{"not": "a list"}')
    with pytest.raises(ConfigError, match="not a JSON list"):
        sharegpt_items(sharegpt_file, 1)


def test_conversations_of_sharegpt_keep_their_turns(sharegpt_file: Path) -> None:
    items = sharegpt_items(sharegpt_file, 3, max_turns=10, mean_think_time_s=2.0, is_shuffled=False)
    first = items[0]
    assert isinstance(first, Conversation)
    assert [turn.num_output_tokens for turn in first.turns] == [25, 50]
    assert all(turn.think_time_s > 0 for turn in first.turns)
    assert num_requests(items) == 4


def test_turn_carries_the_answers_that_were_really_given() -> None:
    talk = Conversation(turns=(Turn("one", 4), Turn("two", 4)), system="be brief", tenant="a")
    history = talk.extended((), 0, "answer 1")
    prompt = talk.prompt(1, history, 5)
    assert prompt.history == (("system", "be brief"), ("user", "one"), ("assistant", "answer 1"))
    assert (prompt.content, prompt.tenant, prompt.conversation, prompt.turn) == ("two", "a", 5, 1)
    assert talk.prompt(0, (), 5).history == (("system", "be brief"),)


def test_custom_lines_may_be_conversations_and_name_tenants(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(
        '{"turns": ["one", "two"], "system": "s", "output_tokens": 3}\n'
        '{"prompt": "p", "tenant": "acme", "model": "chat", "headers": {"X-A": "1"}}\n'
    )
    talk, prompt = custom_items(path, 9, 8, takes_ids=False, repeats=False)
    assert isinstance(talk, Conversation)
    assert [(turn.content, turn.num_output_tokens) for turn in talk.turns] == [("one", 3), ("two", 3)]
    assert prompt == Prompt("p", 8, tenant="acme", model="chat", headers=(("X-A", "1"),))
    path.write_text('{"prompt": "p", "turns": ["one"]}\n')
    with pytest.raises(ConfigError, match="line 1: has neither"):
        custom_items(path, 1, 8, takes_ids=False)


TENANTS = """
[[tenants]]
name = "acme"
weight = 3
api_key_env = "ACME_KEY"
[[tenants]]
name = "small"
api_key = "k2"
model = "other"
headers = { X-Team = "s" }
"""


def test_tenants_share_the_requests_by_weight_with_their_own_keys_and_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    monkeypatch.setenv("ACME_KEY", "k1")
    items = with_tenants([Prompt([1000], 1)] * 400 + [Prompt([1], 1, tenant="acme")], read_tenants(path), 1)
    assert 270 <= sum(item.tenant == "acme" for item in items) <= 330
    by_name = {item.tenant: item for item in items[:400]}
    assert by_name["acme"].headers == (("Authorization", "Bearer k1"),)
    assert by_name["small"].headers == (("Authorization", "Bearer k2"), ("X-Team", "s"))
    assert (by_name["acme"].model, by_name["small"].model) == (None, "other")
    assert items[400].tenant == "acme"
    monkeypatch.delenv("ACME_KEY")
    with pytest.raises(ConfigError, match="ACME_KEY is not set"):
        with_tenants(items, read_tenants(path), 1)


@pytest.mark.parametrize(
    "text", ["[[tenants]]\nname='a'\nwieght=2", "tenants=[]", "[[tenants]]\nname='a'\nweight=0", "not toml"]
)
def test_bad_file_of_tenants_is_refused_with_its_flag(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_tenants(path)
    assert raised.value.param == "--tenants"


def test_nonce_goes_before_every_text_and_differs_between_runs(sharegpt_file: Path) -> None:
    options = BenchServeOptions(
        backend="openai-chat", dataset_name="sharegpt", dataset_path=sharegpt_file, nonce_prefix=True
    )
    first, second = (build_workload(options, 3, (nonce, 0, 0)).items for nonce in (1, 2))
    beginnings = [
        {str(item.content).splitlines()[0] for item in items if isinstance(item, Prompt)}
        for items in (first, second)
    ]
    assert [len(one) for one in beginnings] == [1, 1]
    assert beginnings[0] != beginnings[1]


def test_workload_declares_the_hits_that_it_plants() -> None:
    planted = BenchServeOptions(random_input_len=10, random_output_len=1, random_prefix_len=30)
    assert build_workload(planted, 4, (1,)).prefix_hit_share == pytest.approx(3 * 30 / (4 * 40))
    assert build_workload(BenchServeOptions(), 4, (1,)).prefix_hit_share == 0
    told = BenchServeOptions(prefix_hit_share=0.4)
    assert build_workload(told, 4, (1,)).prefix_hit_share == 0.4


def test_random_conversations_have_their_turns_and_a_common_system_prompt() -> None:
    options = BenchServeOptions(
        backend="openai-chat",
        random_input_len=5,
        random_output_len=2,
        random_prefix_len=3,
        random_num_turns=3,
    )
    workload = build_workload(options, 4, (1,))
    assert workload.num_requests == 12
    assert len({item.system for item in workload.items if isinstance(item, Conversation)}) == 1
    assert workload.num_distinct == 12


def test_repeated_conversations_are_not_distinct_but_their_turns_are() -> None:
    talk = Conversation((Turn("go on", 1), Turn("go on", 1)))
    assert num_distinct_requests([talk, talk, Prompt([1], 1), Prompt([1], 1)]) == 3


@pytest.mark.parametrize("entry", ["[" * 100_000, '{"conversations": ' + "7" * 5_000 + "}"])
def test_sharegpt_entry_that_cannot_be_read_names_the_file_and_the_entry(tmp_path: Path, entry: str) -> None:
    path = tmp_path / "f.json"
    path.write_text('[{"conversations": []}, ' + entry)
    with pytest.raises(ConfigError, match=r"f\.json, entry 2"):
        read_sharegpt(path)


def test_custom_line_nested_too_deep_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text('{"more": ' + "[" * 100_000)
    with pytest.raises(ConfigError, match="line 1"):
        custom_items(path, 1, 4, takes_ids=False)


def test_byte_order_mark_is_no_part_of_a_data_set(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text('{"prompt": "one"}', encoding="utf-8-sig")
    assert custom_items(path, 1, 4, takes_ids=False) == [Prompt("one", 4)]
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    path.write_text(json.dumps([{"conversations": turns}]), encoding="utf-8-sig")
    assert len(read_sharegpt(path)) == 1
    path.write_text('[[tenants]]\nname = "a"\n', encoding="utf-8-sig")
    assert read_tenants(path)[0].name == "a"
    path.write_text("word", encoding="utf-8-sig")
    prompts = text_slice_prompts(path, 1, Lengths(1), Lengths(1), seed=1, nonce=[1])
    assert prompts[0].content == "word"


def test_tenant_weights_without_a_sum_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('[[tenants]]\nname = "a"\nweight = 1e308\n[[tenants]]\nname = "b"\nweight = 1e308\n')
    with pytest.raises(ConfigError, match=r"t\.toml: the weights"):
        read_tenants(path)
