"""`python -m tests.benchmarks.peers`: from the options to the tables."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from loadtest.machine import checkout_commit, describe_machine
from shared.errors import ConfigError
from tests.benchmarks.peers.ceilings import Ceilings, measure_ceilings
from tests.benchmarks.peers.contestant import Absent, Contestant
from tests.benchmarks.peers.headrace import headrace
from tests.benchmarks.peers.instruction_set import environment_limits
from tests.benchmarks.peers.llama import llama
from tests.benchmarks.peers.measurement import Measurement
from tests.benchmarks.peers.openvino import openvino
from tests.benchmarks.peers.options import PeersOptions, chosen, parse_options
from tests.benchmarks.peers.peers_folder import PeersFolder
from tests.benchmarks.peers.report import Background, Report
from tests.benchmarks.peers.rounds import Plan, run_rounds
from tests.benchmarks.peers.vllm import vllm

EXIT_SUCCESS = 0
EXIT_FAILURES = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] = sys.argv[1:]) -> int:
    """0 if every request of every server succeeded, 1 if not, 2 for options that cannot be."""
    try:
        options = parse_options(arguments)
        ours = [headrace(name, file, options.model) for name, file in options.headrace_configs]
        present, absent = _peers(options)
        contestants = [*ours, *chosen(present, options.peers)]
        if options.lists_only:
            _list(contestants, absent)
            return EXIT_SUCCESS
        return _run(options, contestants, absent)
    except ConfigError as error:
        where = f"{error.param}: " if error.param else ""
        print(f"error: {where}{error.message}", file=sys.stderr)
        return EXIT_USAGE


def _peers(options: PeersOptions) -> tuple[list[Contestant], list[Absent]]:
    folder = PeersFolder(options.peers_dir)
    present: list[Contestant] = []
    absent: list[Absent] = []
    found_here = [llama(folder, options.instruction_set, options.model)]
    if options.model is None:  # the others have weights of the default model only
        found_here += [openvino(folder), vllm(folder)]
    for found in found_here:
        if isinstance(found, Absent):
            absent.append(found)
        else:
            present += found
    return present, absent


def _list(contestants: Sequence[Contestant], absent: Sequence[Absent]) -> None:
    for each in contestants:
        print(f"{each.name}: {each.version}")
    for one in absent:
        print(f"{one.family} takes no part: {one.reason}")


def _run(options: PeersOptions, contestants: Sequence[Contestant], absent: Sequence[Absent]) -> int:
    now = datetime.now()
    folder = options.result_dir or Path("bench-results") / f"peers-{now:%Y%m%d-%H%M%S}"
    folder = folder.absolute()
    folder.mkdir(parents=True)
    limits = environment_limits(options.instruction_set, folder)
    ceilings = measure_ceilings(options.num_threads)
    background = _background(
        options, contestants, absent, ceilings, f"{now:%Y-%m-%d}", "LD_PRELOAD" in limits
    )
    plan = Plan(
        contestants=contestants,
        cases=options.cases,
        num_rounds=options.num_rounds,
        num_tries=options.num_tries,
        max_foreign_cores=options.max_foreign_cores,
        num_threads=options.num_threads,
        limits=limits,
        ready_timeout_s=options.ready_timeout_s,
        case_timeout_s=options.case_timeout_s,
        seed=options.seed,
        folder=folder,
    )
    attempts: list[Measurement] = []
    is_interrupted = False
    try:
        for measurement in run_rounds(plan, lambda line: print(line, file=sys.stderr, flush=True)):
            attempts.append(measurement)
            _write_results(folder / "results.json", background, attempts)
    except KeyboardInterrupt:
        is_interrupted = True
        # What was measured until then is told: the rounds that are whole, or what there is of the first.
        num_rounds = max(1, max((each.round_number for each in attempts), default=1) - 1)
        background = replace(background, num_rounds=num_rounds)
        attempts = [each for each in attempts if each.round_number <= num_rounds]
    ours = [each.name for each in contestants if each.is_headrace]
    peers = [each.name for each in contestants if not each.is_headrace]
    text = Report(background, options.cases, ours, peers, attempts).text()
    print(text, flush=True)
    for file in (folder / "report.md", options.output):
        if file is not None:
            file.write_text(text, encoding="utf-8")
    print(f"raw results and logs: {folder}", file=sys.stderr)
    if is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if any(each.error for each in attempts) else EXIT_SUCCESS


def _background(
    options: PeersOptions,
    contestants: Sequence[Contestant],
    absent: Sequence[Absent],
    ceilings: Ceilings | None,
    date: str,
    is_narrowed: bool,
) -> Background:
    versions: dict[str, str] = {}
    for each in contestants:
        versions.setdefault(each.family, each.version)
    return Background(
        date=date,
        machine=describe_machine(),
        instruction_set=options.instruction_set,
        is_narrowed=is_narrowed,
        num_threads=options.num_threads,
        commit=checkout_commit(),
        torch=torch.__version__,
        ceilings=ceilings,
        versions=list(versions.items()),
        absent=absent,
        num_rounds=options.num_rounds,
        max_foreign_cores=options.max_foreign_cores,
        command=shlex.join(["python", "-m", "tests.benchmarks.peers", *sys.argv[1:]]),
    )


def _write_results(path: Path, background: Background, attempts: Sequence[Measurement]) -> None:
    """After each run, whole: what was measured is not lost with what comes later."""
    document: dict[str, Any] = {
        "background": asdict(background),
        "attempts": [asdict(each) for each in attempts],
    }
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(document, indent=1), encoding="utf-8")
    unfinished.replace(path)
