"""Worlds with structured output: small vocabularies, hand-made grammars, compilers that wait to be told."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from engine_service.fake_runner import FakeModel
from engine_service.refusal import Refusal
from engine_service.structured_output.grammar import Grammar, PackedMask, refused
from engine_service.structured_output.grammar_desk import GrammarDesk
from engine_service.structured_output.llguidance_grammar import LlguidanceVocabulary, compile_grammar
from shared.sampling import StructuredOutput, StructuredOutputKind
from shared.text_bundle import TextBundle
from shared.tokenizer import Tokenizer
from tests.unit.worlds import EOS, VOCAB_SIZE, World, make_world

WAIT_S = 20.0


def form(kind: StructuredOutputKind, text: Any = "", *, is_strict: bool = False) -> StructuredOutput:
    return StructuredOutput(kind, text if isinstance(text, str) else json.dumps(text), is_strict)


class TextWorld:
    """A fake engine over a real tokenizer and real grammars, spoken to in text."""

    def __init__(self, bundle: TextBundle, grammars: GrammarDesk, **options: Any) -> None:
        self.tokenizer = Tokenizer(bundle)
        self.eos = bundle.eos_token_ids[0]
        closers = frozenset(
            token_id
            for token_id in range(self.tokenizer.vocab_size)
            if set(self.tokenizer.decode([token_id])) <= set('"}],') and token_id != self.eos
        )
        model = FakeModel(range(32, 127), eos_token_id=self.eos, closers=closers)
        self.world = make_world(
            model=model,
            grammars=grammars,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_id=self.eos,
            **{"num_blocks": 512, "max_model_len": 1000, **options},
        )

    def add(self, name: str, structured_output: StructuredOutput | None, **options: Any) -> None:
        values = {"max_tokens": 400, "temperature": 1.0, **options}
        prompt = values.pop("prompt", self.tokenizer.encode("Answer in the form: "))
        self.world.add(name, prompt, structured_output=structured_output, **values)

    def text(self, name: str) -> str:
        token_ids = self.world.output[name]
        return self.tokenizer.decode([t for t in token_ids if t != self.eos], skip_special_tokens=False)

    def run(self) -> None:
        run_to_the_end(self.world)


def run_to_the_end(world: World) -> None:
    """Steps until nothing is left; waits, without sleeping in steps, while all wait for grammars."""
    deadline = time.monotonic() + WAIT_S
    woken = threading.Event()
    world.engine.wake_with(woken.set)
    while world.engine.has_work:
        assert time.monotonic() < deadline, f"still at work: {world.engine.load()}"
        if world.engine.only_awaits_grammars:
            woken.wait(0.2)
            woken.clear()
        world.step()
    world.assert_idle()


class InProcessCompiler:
    """The real grammars without the process that tries them out."""

    def __init__(self, bundle: TextBundle) -> None:
        self._tokenizer = vocabulary_of(bundle).tokenizer()

    def compile(self, form: StructuredOutput) -> Grammar:
        return compile_grammar(self._tokenizer, form)

    def close(self) -> None:
        pass


def vocabulary_of(bundle: TextBundle) -> LlguidanceVocabulary:
    return LlguidanceVocabulary(
        bundle.tokenizer_json, Tokenizer(bundle).vocab_size, list(bundle.eos_token_ids)
    )


class CountState:
    """Allows the tokens 0 to 9, `length` of them, then nothing but the end; checks how it is used."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.accepted: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) >= self.length

    def accept(self, token_id: int) -> None:
        assert not self.is_complete, "advanced after its end"
        if token_id not in range(10):
            raise refused(f"token {token_id} does not belong here")
        self.accepted.append(token_id)

    def mask(self) -> PackedMask | None:
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=np.uint8)
        bits[range(10) if not self.is_complete else [EOS]] = 1
        return np.packbits(bits, bitorder="little")


class CountGrammar:
    """Keeps the states that it has given out, for tests to look at."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.states: list[CountState] = []

    def start(self, output_token_ids: Iterable[int] = ()) -> CountState:
        state = CountState(self._length)
        for token_id in output_token_ids:
            state.accept(token_id)
        self.states.append(state)
        return state


class ToldCompiler:
    """Compiles only when the test says so; counts what it was asked for."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[StructuredOutput] = queue.SimpleQueue()
        self.is_closed = False
        self._results: dict[str, queue.SimpleQueue[Grammar | BaseException]] = {}
        self._lock = threading.Lock()

    def compile(self, form: StructuredOutput) -> Grammar:
        self.asked.put(form)
        result = self._queue(form.text).get()
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        self.is_closed = True

    def tell(self, text: str, result: Grammar | Refusal | BaseException) -> None:
        """What the next compilation of this text gives."""
        self._queue(text).put(result)

    def _queue(self, text: str) -> queue.SimpleQueue[Grammar | BaseException]:
        with self._lock:
            return self._results.setdefault(text, queue.SimpleQueue())
