"""The body of a request for embeddings: OpenAI's fields, and vLLM's `priority`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.openai.schema import INT32_MAX, ModelBody, Priority, TokenId

MAX_INPUTS = 2048  # OpenAI's

Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _form_of(given: Any) -> str:
    """By the first entry: so that of four forms the one that was meant is checked, and complains.

    The tags are written like types, which `check_body` leaves out of a field's name.
    """
    if not isinstance(given, list):
        return "str"
    first = given[0] if given else ""
    if isinstance(first, list):
        return "list[list[int]]"
    # A bool or a float is a wrong token rather than a wrong text.
    return "list[int]" if isinstance(first, int | float) else "list[str]"


Input = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS), Tag("list[str]")]
    | Annotated[TokenIds, Tag("list[int]")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS), Tag("list[list[int]]")],
    Discriminator(_form_of),
]


class VectorsBody(ModelBody):
    """Of any endpoint that answers with what an embedding model makes."""

    priority: Priority = 0


class EmbeddingsBody(VectorsBody):
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, le=INT32_MAX)

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """Always several."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [given]
        return given

    def param_of(self, index: int) -> str:
        """How the client would name one of its inputs."""
        is_list_of_inputs = isinstance(self.input, list) and not isinstance(self.input[0], int)
        return f"input[{index}]" if is_list_of_inputs else "input"
