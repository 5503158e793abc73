"""What the benchmark can be asked to do; nonsense is refused before anything is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from tests.benchmarks.peers.case import CASES, Case
from tests.benchmarks.peers.contestant import Contestant
from tests.benchmarks.peers.headrace import BUILT_IN, DEFAULTS
from tests.benchmarks.peers.instruction_set import INSTRUCTION_SETS, InstructionSet
from tests.benchmarks.peers.peers_folder import DEFAULT_PEERS_DIR

MAX_SEED = 4000  # nonces are made of it


@dataclass(frozen=True, slots=True)
class PeersOptions:
    peers_dir: Path
    peers: tuple[str, ...] | None  # families or names; None: all that are installed
    headrace_configs: tuple[tuple[str, Path | None], ...]  # None: built in
    model: Path | None  # a GGUF file; None: the default model
    cases: tuple[Case, ...]
    instruction_set: InstructionSet
    num_rounds: int
    num_tries: int
    max_foreign_cores: float
    num_threads: int
    ready_timeout_s: float
    case_timeout_s: float
    seed: int
    output: Path | None
    result_dir: Path | None
    lists_only: bool


def parse_options(arguments: Sequence[str]) -> PeersOptions:
    """Raises ConfigError that names the flag; argparse itself ends the program for a flag that is none."""
    given = _parser().parse_args(arguments)
    options = PeersOptions(
        peers_dir=given.peers_dir.absolute(),
        peers=None if given.peers is None else _listed(given.peers),
        headrace_configs=_configs(given.headrace_config),
        model=None if given.model is None else given.model.absolute(),
        cases=_cases(given.cases),
        instruction_set=given.isa,
        num_rounds=given.rounds,
        num_tries=given.tries,
        max_foreign_cores=given.max_foreign_cores,
        num_threads=given.threads,
        ready_timeout_s=given.ready_timeout_s,
        case_timeout_s=given.case_timeout_s,
        seed=given.seed,
        output=given.output,
        result_dir=given.result_dir,
        lists_only=given.list,
    )
    _check(options)
    return options


def chosen(present: Sequence[Contestant], names: tuple[str, ...] | None) -> list[Contestant]:
    """Those whose name or family is named, in that order. Raises ConfigError for a name of nobody."""
    if names is None:
        return list(present)
    found: list[Contestant] = []
    for name in names:
        fitting = [each for each in present if name in (each.name, each.family)]
        if not fitting:
            installed = ", ".join(each.name for each in present) or "none"
            raise ConfigError(f"no peer {name!r} is installed; installed: {installed}", "--peers")
        found += [each for each in fitting if each not in found]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers",
        description="Headrace against the peers that are installed, in turns, through HTTP.",
    )
    add = parser.add_argument
    add("--peers-dir", type=Path, default=DEFAULT_PEERS_DIR, help="where install.py put them")
    add("--peers", help="names or families, e.g. llama,openvino-fp32; '' for none; default: all installed")
    add(
        "--headrace-config",
        action="append",
        metavar="NAME[=FILE]",
        help=f"repeatable; built in: {', '.join(BUILT_IN)}; default: {', '.join(DEFAULTS)}",
    )
    add(
        "--model",
        type=Path,
        help="a GGUF file with the default model's tokenizer; llama.cpp only, peers/large_model.py",
    )
    add("--cases", default=",".join(CASES), help="default: %(default)s")
    add("--isa", choices=INSTRUCTION_SETS, default="native", help="avx2: show every server no more")
    add("--rounds", type=int, default=3)
    add("--tries", type=int, default=3, help="of a run that others disturb")
    add("--max-foreign-cores", type=float, default=0.15, help="of others, before a run is repeated")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each server")
    add("--ready-timeout-s", type=float, default=600.0)
    add("--case-timeout-s", type=float, default=900.0)
    add("--seed", type=int, default=0, help="of the prompts")
    add("--output", type=Path, help="a file for the tables, which are printed in any case")
    add(
        "--result-dir",
        type=Path,
        help="new; for results.json and logs; default: bench-results/peers-DATE",
    )
    add("--list", action="store_true", help="only tell what would take part")
    return parser


def _check(options: PeersOptions) -> None:
    if options.model is not None and not options.model.is_file():
        raise ConfigError(f"{options.model} is no file", "--model")
    if options.model is not None and any(file for _, file in options.headrace_configs):
        raise ConfigError("with a configuration file the model stands there", "--model")
    for flag, value, low in (
        ("--rounds", options.num_rounds, 1),
        ("--tries", options.num_tries, 1),
        ("--threads", options.num_threads, 1),
        ("--seed", options.seed, 0),
    ):
        if value < low:
            raise ConfigError(f"must be at least {low}, got {value}", flag)
    if options.num_rounds >= 1000 or options.num_tries >= 100:
        raise ConfigError("no more than 999 rounds of 99 tries", "--rounds")
    if options.seed > MAX_SEED:
        raise ConfigError(f"must be at most {MAX_SEED}, got {options.seed}", "--seed")
    for flag, seconds in (
        ("--ready-timeout-s", options.ready_timeout_s),
        ("--case-timeout-s", options.case_timeout_s),
        ("--max-foreign-cores", options.max_foreign_cores),
    ):
        if not seconds > 0:
            raise ConfigError(f"must be above 0, got {seconds:g}", flag)
    if options.result_dir is not None and options.result_dir.exists():
        raise ConfigError(f"{options.result_dir} is there already", "--result-dir")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise ConfigError(f"{options.output.absolute().parent} is no folder", "--output")


def _cases(text: str) -> tuple[Case, ...]:
    names = _listed(text)
    for name in names:
        if name not in CASES:
            raise ConfigError(f"{name!r} is not one of: {', '.join(CASES)}", "--cases")
    if not names:
        raise ConfigError("names no case", "--cases")
    return tuple(CASES[name] for name in names)


def _configs(given: list[str] | None) -> tuple[tuple[str, Path | None], ...]:
    if given is None:
        return tuple((name, None) for name in DEFAULTS)
    configs: dict[str, Path | None] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not name or (equals and not file):
            raise ConfigError(f"{text!r} is not of the form NAME=FILE", "--headrace-config")
        if not equals and name not in BUILT_IN:
            raise ConfigError(
                f"{name!r} is not built in ({', '.join(BUILT_IN)}); write NAME=FILE", "--headrace-config"
            )
        if name in configs:
            raise ConfigError(f"{name!r} is named twice", "--headrace-config")
        configs[name] = Path(file) if equals else None
    return tuple(configs.items())


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
