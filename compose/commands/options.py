"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="headrace.toml; by default the one in this directory, if any."
    ),
]
RunDirOption = Annotated[
    Path,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        envvar="HEADRACE_RUN_DIR",
        help="Where a stack keeps its data, sockets and stack.json.",
    ),
]
EngineNumberOption = Annotated[
    int | None, typer.Option("--engines", metavar="N", min=1, help="Engine processes per model.")
]
PortOption = Annotated[
    int | None, typer.Option("--port", metavar="P", min=0, max=65535, help="HTTP port; 0 for any free one.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="HEADRACE_URL",
        help="Of a stack elsewhere; its token from HEADRACE_ADMIN_TOKEN.",
    ),
]

DEFAULT_RUN_DIR = Path(".headrace")
