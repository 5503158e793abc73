"""Parameters of embeddings, as a user of the offline classes writes them: vLLM's."""

from __future__ import annotations

from pydantic import Field

from engine_service.offline.user_params import UserParams


class PoolingParams(UserParams):
    dimensions: int | None = Field(None, ge=1)  # numbers in each vector; None: as many as the model has
