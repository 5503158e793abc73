"""All rows, and a run of them against one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loadtest.conformance.check import CheckFailed, NotApplicable
from loadtest.conformance.row import Row, rows_of
from loadtest.conformance.rows import (
    anthropic_client,
    back_pressure,
    bodies,
    chat,
    completions,
    connections,
    cross_origin,
    embeddings,
    errors,
    headers,
    messages,
    messages_tools,
    models,
    openai_client,
    openai_js_client,
    openapi,
    rendering,
    responses,
    responses_tools,
    sampling,
    scores,
    streams,
    structured_output,
    tokens,
    tools,
)
from loadtest.conformance.server import Server
from shared.errors import UserError

GROUPS = (
    models, chat, streams, completions, sampling, structured_output, tools, responses, responses_tools,
    messages, messages_tools, embeddings, scores, tokens, rendering, errors, headers, bodies, connections,
    back_pressure, cross_origin, openapi, openai_client, openai_js_client, anthropic_client,
)  # fmt: skip


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Result:
    row: Row
    outcome: Outcome
    reason: str  # "" of a row that passed
    duration_s: float


def all_rows() -> list[Row]:
    return [row for module in GROUPS for row in rows_of(module)]


def select_rows(groups: Sequence[str] = (), names: Sequence[str] = ()) -> list[Row]:
    """Those of these groups and with these names; all, if neither is given.

    Raises UserError for unknown ones.
    """
    rows = all_rows()
    for asked, known, option in (
        (groups, list(dict.fromkeys(row.group for row in rows)), "--group"),
        (names, [row.name for row in rows], "--row"),
    ):
        for one in asked:
            if one not in known:
                raise UserError(f"there is no {option[2:]} {one!r}; there are: {', '.join(known)}", option)
    if not groups and not names:
        return rows
    return [row for row in rows if row.group in groups or row.name in names]


async def run_rows(
    server: Server, rows: Sequence[Row], *, timeout_s: float, concurrency: int = 1
) -> AsyncIterator[Result]:
    """Results in the order of the rows, each as soon as those before it are there."""
    turns = asyncio.Semaphore(concurrency)

    async def run(row: Row) -> Result:
        async with turns:
            return await _run_row(server, row, timeout_s)

    async with asyncio.TaskGroup() as group:
        for task in [group.create_task(run(row)) for row in rows]:
            yield await task


async def _run_row(server: Server, row: Row, timeout_s: float) -> Result:
    started = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            await row.run(server)
    except NotApplicable as reason:
        outcome, why = Outcome.NOT_APPLICABLE, str(reason)
    except CheckFailed as reason:
        outcome, why = Outcome.FAILED, str(reason)
    except TimeoutError:
        outcome, why = Outcome.FAILED, f"it was not over within {timeout_s:g} s"
    except KeyError as error:
        outcome, why = Outcome.FAILED, f"the answer lacks {error}"
    except Exception as error:  # an answer of a shape that the row did not expect, or a broken connection
        outcome, why = Outcome.FAILED, f"{type(error).__name__}: {error}"
    else:
        outcome, why = Outcome.PASSED, ""
    return Result(row, outcome, " ".join(why.split()), time.monotonic() - started)
