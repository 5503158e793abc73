"""Tells the results of `headrace knee` from those of `bench serve`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from loadtest.knee.result import KIND, KneeResult, read_result
from loadtest.report.bench_result import BenchRun, read_bench_file
from loadtest.report.figures import check_figures
from shared.errors import ConfigError


def read_results(paths: Sequence[Path]) -> KneeResult | list[BenchRun]:
    """One search, or the runs of all files. Raises ConfigError with the file and what is wrong with it."""
    are_searches = [is_search(path) for path in paths]
    if not any(are_searches):
        return [run for path in paths for run in read_bench_file(path)]
    if len(paths) > 1:
        path = paths[are_searches.index(True)]
        raise ConfigError(
            f"{path} is a result of `headrace knee`: these are shown one at a time, or by `headrace compare`"
        )
    result = read_result(paths[0])
    check_figures(result, paths[0])
    return result


def is_search(path: Path) -> bool:
    """Whether it says to be the result of a search. What cannot be read is none: who reads it will tell."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    extras = document.get("headrace") if isinstance(document, dict) else None
    return isinstance(extras, dict) and extras.get("kind") == KIND
