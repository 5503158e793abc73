"""Compiles grammars for one model, each tried out elsewhere first."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from llguidance import LLTokenizer

from engine_service.structured_output.grammar import refused
from engine_service.structured_output.llguidance_grammar import (
    LlguidanceGrammar,
    LlguidanceVocabulary,
    check_size,
    compile_grammar,
    schemas_of,
)
from engine_service.structured_output.special_texts import refuse_special_texts, special_texts
from engine_service.structured_output.trial import TIME_LIMIT_S, Trial
from shared.sampling import StructuredOutput


class LlguidanceCompiler:
    """Implements GrammarCompiler. Costs nothing before the first form comes.

    As many trial processes run as there were ever compilations at once.
    """

    def __init__(self, vocabulary: LlguidanceVocabulary, trial_limit_s: float = TIME_LIMIT_S) -> None:
        self._vocabulary = vocabulary
        self._trial_limit_s = trial_limit_s
        self._special_texts: tuple[str, ...] | None = None  # not yet looked for
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._idle: queue.LifoQueue[Trial] = queue.LifoQueue()
        self._trials: list[Trial] = []
        self._is_closed = False

    def compile(self, form: StructuredOutput) -> LlguidanceGrammar:
        check_size(form)
        if self._special_texts is None:
            self._special_texts = special_texts(self._vocabulary.tokenizer_json)
        refuse_special_texts(form, schemas_of(form), self._special_texts)
        with self._trial() as trial:
            trial.run(form)
        return compile_grammar(self._shared_tokenizer(), form)

    def close(self) -> None:
        self._is_closed = True
        for trial in self._trials:
            trial.close()

    @contextmanager
    def _trial(self) -> Iterator[Trial]:
        try:
            trial = self._idle.get_nowait()
        except queue.Empty:
            trial = Trial(self._vocabulary, self._trial_limit_s)
            self._trials.append(trial)
        if self._is_closed:
            raise refused("the engine is about to stop")
        try:
            yield trial
        finally:
            self._idle.put(trial)

    def _shared_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._vocabulary.tokenizer()
            return self._tokenizer
