"""JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError if the file is missing or does not hold an object."""
    content = _read(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object", "source")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Raises ConfigError if the file is missing or does not hold an array."""
    content = _read(path)
    if not isinstance(content, list):
        raise ConfigError(f"{path} does not hold a JSON array", "source")
    return content


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", "source") from error
