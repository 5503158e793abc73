"""`headrace chat`: talk to a stack from the terminal, or pipe a question into it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from compose.commands.options import DEFAULT_RUN_DIR, RunDirOption

if TYPE_CHECKING:
    from compose.conversation import Conversation

EXIT_FAILED = 1


def chat(
    model: Annotated[str | None, typer.Option("--model", help="Default: the first one of the stack.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="How the model should behave.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=2, help="0: no chance.")] = 0.5,
    url: Annotated[
        str | None, typer.Option("--url", help="Of a stack elsewhere; its key from HEADRACE_API_KEY.")
    ] = None,
    run_dir: RunDirOption = DEFAULT_RUN_DIR,
) -> None:
    """Chat. Ctrl-C stops an answer, Ctrl-D leaves. Text on stdin is one question."""
    from compose.conversation import Conversation  # local: see compose/cli.py
    from compose.gateway_client import GatewayClient, GatewayError, first_writer
    from compose.stack_access import API_KEY, ready_stack
    from compose.stack_config import required_secret
    from shared.errors import ConfigError

    if url is not None:
        address, key = url.rstrip("/").removesuffix("/v1"), required_secret(API_KEY)
    else:
        stack = ready_stack(run_dir)
        address, key = stack.url, stack.demo_key
    try:
        client = GatewayClient(address, key)
        name = model or first_writer(client.models())
        if name is None:
            raise ConfigError("this key may use no model that writes", "model")
        conversation = Conversation(
            client, name, max_tokens=max_tokens, temperature=temperature, system=system
        )
        if sys.stdin.isatty():
            _converse(conversation)
        else:
            _answer(conversation, sys.stdin.read())
    except GatewayError as error:
        typer.echo(f"headrace: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error


def _converse(conversation: Conversation) -> None:
    import readline  # noqa: F401 - local: see compose/cli.py; imported, it gives input() a line editor

    typer.echo(f"{conversation.model}. Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            question = input("> ")
        except KeyboardInterrupt:
            typer.echo()
            continue
        except EOFError:
            typer.echo()
            return
        if question.strip():
            _answer(conversation, question)


def _answer(conversation: Conversation, question: str) -> None:
    pieces = conversation.ask(question)
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        sys.stdout.write(" …")
    finally:
        pieces.close()  # ends the request; what came of the answer stays in the conversation
    sys.stdout.write("\n")
