"""The schemas of well-known configuration files that the package check-jsonschema ships."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any


def shipped_schemas() -> dict[str, dict[str, Any]]:
    """By name. Read from the list of its files: to import the package would need all that it depends on."""
    files = importlib.metadata.files("check-jsonschema") or []
    return {
        file.stem: json.loads(file.locate().read_text("utf-8"))
        for file in sorted(files)
        if file.parent.name == "vendor" and file.suffix == ".json"
    }
