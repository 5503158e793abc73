"""The bar that `LLM.generate` and `LLM.embed` show."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

# Installed with huggingface-hub, which the engine needs anyway.
from tqdm import tqdm  # type: ignore[import-untyped]


class Progress:
    """Counts finished prompts, and the tokens that they gave or, for embeddings, had."""

    def __init__(self, num_prompts: int, use_tqdm: bool | Callable[..., Any]) -> None:
        """`use_tqdm`: whether to show it, or what to show it with instead of tqdm."""
        make = use_tqdm if callable(use_tqdm) else tqdm
        shows = bool(use_tqdm)
        self._bar = make(total=num_prompts, desc="Processed prompts", dynamic_ncols=True) if shows else None
        self._began_s = time.monotonic()
        self._num_tokens = 0

    def advance(self, num_tokens: int, num_prompts: int = 1) -> None:
        if self._bar is not None:
            self._num_tokens += num_tokens
            elapsed_s = max(time.monotonic() - self._began_s, 1e-6)
            self._bar.set_postfix_str(f"{self._num_tokens / elapsed_s:.1f} tokens/s", refresh=False)
            self._bar.update(num_prompts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
