"""What can be asked of an embedding model: the same for gateways, engines and scripts."""

from __future__ import annotations

from shared.errors import InvalidRequest
from shared.messages import ModelCard


def dim_of(asked: int | None, card: ModelCard) -> int:
    """Numbers in each vector, of which a client may have asked for fewer. Raises InvalidRequest.

    Only a model that was trained for it (Matryoshka representation learning, arXiv 2205.13147) has what
    matters in its first numbers. Of others, short vectors are refused, as in vLLM, rather than given badly.
    """
    whole = card.embedding_dim
    if asked is None or asked == whole:
        return whole
    if not 1 <= asked <= whole:
        raise InvalidRequest(f"the vectors of this model have 1 to {whole} dimensions", "dimensions")
    allowed = card.matryoshka_dimensions
    if allowed is None:
        raise InvalidRequest(
            f"this model was not trained to have fewer than its {whole} dimensions", "dimensions"
        )
    if allowed and asked not in allowed:
        known = ", ".join(map(str, sorted({*allowed, whole})))
        raise InvalidRequest(f"the vectors of this model have one of {known} dimensions", "dimensions")
    return asked
