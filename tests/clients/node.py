"""The cases of `js/`: their names, and their outcomes after one run of Node's own test runner."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "js"
OLDEST_NODE = 22  # that the client supports
TIMEOUT_S = 240
_INSTALL = "run `make clients`, which installs Node and the packages of tests/clients/js"


def cases() -> list[str]:
    """Of all files, without running them: pytest wants to know its tests first."""
    return [
        name
        for file in sorted(FOLDER.glob("*.test.mjs"))
        for name in re.findall(r'^test\("([^"]+)"', file.read_text(), re.MULTILINE)
    ]


def run(names: list[str], environment: Mapping[str, str]) -> dict[str, str | None]:
    """What was wrong with each case that ran, or None. Raises RuntimeError that says what is missing."""
    node = _node()
    if not (FOLDER / "node_modules" / "openai").is_dir():
        raise RuntimeError(f"the JavaScript client is not installed: {_INSTALL}")
    only = "^(" + "|".join(re.escape(name) for name in names) + ")$"
    command = [
        node, "--test", "--test-concurrency=1", f"--test-name-pattern={only}",
        "--test-reporter=./case_reporter.mjs", *sorted(file.name for file in FOLDER.glob("*.test.mjs")),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=FOLDER,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not outcomes:
        raise RuntimeError(f"Node ran nothing:\n{done.stdout}\n{done.stderr}")
    return {
        outcome["name"]: None if outcome["passed"] else outcome["message"] or "failed" for outcome in outcomes
    }


def _node() -> str:
    """Of this Python environment, else of the system."""
    here = Path(sys.executable).parent
    node = shutil.which("node", path=f"{here}{os.pathsep}{os.environ.get('PATH', '')}")
    if node is None:
        raise RuntimeError(f"Node is not installed: {_INSTALL}")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").split(".")[0]) < OLDEST_NODE:
        raise RuntimeError(f"{node} is {version}, and the client needs {OLDEST_NODE} or later: {_INSTALL}")
    return node
