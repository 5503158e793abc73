"""The bodies of /v1/score (vLLM's fields) and /v1/rerank (Jina's and Cohere's): texts to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.openai.embeddings_body import MAX_INPUTS, Text, VectorsBody
from gateway.openai.schema import INT32_MAX, Body, FieldError


def _form_of_texts(given: Any) -> str:
    """The tags are written like types, which `check_body` leaves out of a field's name."""
    return "list[str]" if isinstance(given, list) else "str"


Texts = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS), Tag("list[str]")],
    Discriminator(_form_of_texts),
]
# vLLM has had four names for the same two things; the first of each pair may be one for all of the second.
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreBody(VectorsBody):
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    @model_validator(mode="after")
    def _has_one_pair_that_fits(self) -> ScoreBody:
        given = [name for name in sum(PAIRS, ()) if getattr(self, name) is not None]
        if not given:
            raise FieldError("text_1", "text_1 and text_2 are needed, or queries and documents")
        firsts, seconds = self.names
        for name in given:
            if name not in (firsts, seconds):
                raise FieldError(name, f"it does not go with {given[0]}")
        for name in (firsts, seconds):
            if getattr(self, name) is None:
                raise FieldError(name, "it is missing")
        num_firsts, num_seconds = len(self.first_texts), len(self.second_texts)
        if num_firsts not in (1, num_seconds):
            message = f"there must be one text, or as many as in {seconds}: {num_seconds}, not {num_firsts}"
            raise FieldError(firsts, message)
        return self

    @property
    def names(self) -> tuple[str, str]:
        """The fields that this client uses: the pair of which it gave most."""
        return max(PAIRS, key=lambda pair: sum(getattr(self, name) is not None for name in pair))

    @property
    def first_texts(self) -> list[str]:
        return _several(getattr(self, self.names[0]))

    @property
    def second_texts(self) -> list[str]:
        return _several(getattr(self, self.names[1]))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        firsts, seconds = self.first_texts, self.second_texts
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        return list(zip(firsts, seconds, strict=True))

    @property
    def named_texts(self) -> list[tuple[str, str]]:
        """Every text, with the name that the client would call it by."""
        return [
            (text, f"{name}[{index}]" if isinstance(getattr(self, name), list) else name)
            for name in self.names
            for index, text in enumerate(_several(getattr(self, name)))
        ]


class Document(Body):
    text: Text


def _form_of_document(given: Any) -> str:
    return "list[str]" if isinstance(given, str) else "list[Document]"


AnyDocument = Annotated[
    Annotated[Text, Tag("list[str]")] | Annotated[Document, Tag("list[Document]")],
    Discriminator(_form_of_document),
]


class RerankBody(VectorsBody):
    query: Text
    documents: Annotated[list[AnyDocument], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: int | None = Field(None, ge=0, le=INT32_MAX)  # None, and vLLM's 0: all of them
    return_documents: bool | None = None  # None: yes, as vLLM and Jina have it

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def named_texts(self) -> list[tuple[str, str]]:
        """Every text, with the name that the client would call it by."""
        named = [
            (text, f"documents[{index}]" if isinstance(given, str) else f"documents[{index}].text")
            for index, (given, text) in enumerate(zip(self.documents, self.texts, strict=True))
        ]
        return [(self.query, "query"), *named]


class DistinctTexts:
    """Texts of which those that occur twice are embedded once. Implements Inputs."""

    def __init__(self, named_texts: Sequence[tuple[str, str]]) -> None:
        self._params: dict[str, str] = {}
        for text, param in named_texts:
            self._params.setdefault(text, param)
        self.inputs: list[str] = list(self._params)

    def param_of(self, index: int) -> str:
        """Where it occurs first."""
        return self._params[self.inputs[index]]


def _several(texts: str | list[str] | None) -> list[str]:
    if texts is None:
        return []
    return [texts] if isinstance(texts, str) else texts
