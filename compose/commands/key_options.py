"""Options of `headrace keys` that say what a key is good for."""

from __future__ import annotations

from typing import Annotated

import typer

NameOption = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="For people: who has it.")]
ExpiresOption = Annotated[
    str | None,
    typer.Option("--expires", metavar="WHEN", help="30d, 24h, or a date such as 2027-01-31; none: never."),
]
NotBeforeOption = Annotated[
    str | None,
    typer.Option("--not-before", metavar="WHEN", help="It works from then on. none: at once."),
]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option("--models", metavar="A,B", help="Routes that it may use. none: all of its tenant's."),
]
CidrOption = Annotated[
    list[str] | None,
    typer.Option("--cidr", metavar="NET", help="Clients' addresses, such as 10.0.0.0/8. none: any."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print a JSON document.")]


def _limit(flag: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        flag, metavar="N", min=0, help=f"{text} 0: no limit of its own."
    )
    return option


RequestsPerMinuteOption = Annotated[int | None, _limit("--requests-per-minute", "Requests of this key.")]
BurstOption = Annotated[int | None, _limit("--burst", "Of them at one instant.")]
InputTokensOption = Annotated[int | None, _limit("--input-tokens-per-minute", "Tokens of prompts.")]
OutputTokensOption = Annotated[int | None, _limit("--output-tokens-per-minute", "Tokens of answers.")]
TokensPerMinuteOption = Annotated[int | None, _limit("--tokens-per-minute", "Tokens, both together.")]
TokensPerDayOption = Annotated[int | None, _limit("--tokens-per-day", "The same for a day of UTC.")]
MaxConcurrencyOption = Annotated[int | None, _limit("--max-concurrency", "Requests that run at once.")]
MaxPromptOption = Annotated[int | None, _limit("--max-prompt-tokens", "Tokens of one prompt.")]
MaxOutputOption = Annotated[int | None, _limit("--max-output-tokens", "Tokens of one choice.")]
