"""Request bodies, checked at the door. Unknown fields are refused by name.

Fields that OpenAI or vLLM know but that are not served yet are listed with the one value that
means "off", so that a client which always sends them works and one which needs them is told.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from gateway.errors import ApiError, invalid_request
from gateway.openai.chat_message import Message
from gateway.openai.conversation import (
    RESERVED_TEMPLATE_VARIABLES,
    Conversation,
    ReasoningEffort,
    ToolChoice,
)
from gateway.openai.strict_body import Body as Body
from gateway.openai.strict_body import FieldError as FieldError
from gateway.openai.strict_body import Label as Label
from gateway.openai.tool_fields import MAX_TOOLS, FunctionTool, NamedToolChoice
from shared.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MIN_REPETITION_PENALTY,
    BeamSearch,
    StructuredOutput,
)
from shared.section import Section

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOP_STRINGS = 16
MAX_OUTPUT_CHOICES = 4096

INT32_MAX = 2**31 - 1
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=128)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Priority = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]  # vLLM's, see gateway/priority.py


class StreamOptions(Body):
    include_usage: bool = False


class JsonSchemaFormat(Body):
    """A schema that the answer must satisfy. `strict`: refuse a schema that cannot be enforced in full."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_a_schema_where_one_is_meant(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type 'json_schema', and with no other")
        return self

    @property
    def form(self) -> StructuredOutput | None:
        if self.json_schema is not None:
            text = json.dumps(self.json_schema.json_schema)
            return StructuredOutput("json_schema", text, is_strict=bool(self.json_schema.strict))
        return StructuredOutput("json_object") if self.type == "json_object" else None


class StructuredOutputs(Body):
    """vLLM's way to ask for a form of the output."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_OUTPUT_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool = False

    @model_validator(mode="after")
    def _has_one_form(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(form is not None for form in given) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object is needed")
        return self

    @property
    def form(self) -> StructuredOutput:
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return StructuredOutput("json_schema", text, is_strict=True)  # as vLLM: enforced or refused
        if self.regex is not None:
            return StructuredOutput("regex", self.regex)
        if self.choice is not None:
            return StructuredOutput("choice", json.dumps(self.choice))
        if self.grammar is not None:
            return StructuredOutput("grammar", self.grammar)
        return StructuredOutput("json_object")


class ModelBody(Body):
    """What names a model."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    user: Label | None = None


class StreamableBody(ModelBody):
    """Of any endpoint that generates."""

    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, document: Any) -> Any:
        """Clients write null for what they leave to us, also where the default is something else."""
        if not isinstance(document, dict):
            return document
        return {
            name: value for name, value in document.items() if value is not None or cls._may_be_null(name)
        }

    @classmethod
    def _may_be_null(cls, name: str) -> bool:
        info = cls.model_fields.get(name)
        return info is None or info.is_required() or info.default is None

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Says of nulls what `_null_means_default` does with them."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, info in cls.model_fields.items():
            if not cls._may_be_null(name):
                field = properties[info.alias or name]
                about = {word: field.pop(word) for word in ("default", "description") if word in field}
                properties[info.alias or name] = {"anyOf": [field, {"type": "null"}], **about}
        return schema


class SamplingFields(Body):
    """How to choose tokens: under the same names in all endpoints of OpenAI's that generate."""

    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, float] | None = None
    # vLLM's
    top_k: int = Field(0, ge=-1, le=INT32_MAX)
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=10, allow_inf_nan=False)
    min_tokens: int = Field(0, ge=0, le=INT32_MAX)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=128)
    allowed_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: list[BadWord] = Field(default_factory=list, max_length=MAX_BAD_WORDS // 2)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: Label | None = None
    priority: Priority = 0
    structured_outputs: StructuredOutputs | None = None


class GenerationBody(SamplingFields, StreamableBody):
    """Fields that chat and plain completions share: what can be asked of a model."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    response_format: ResponseFormat | None = None
    # vLLM's
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY, allow_inf_nan=False)
    # accepted without effect: they are about the caller's own bookkeeping
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    @field_validator("prompt_logprobs")
    @classmethod
    def _is_not_streamed(cls, prompt_logprobs: int | None, info: ValidationInfo) -> int | None:
        if prompt_logprobs is not None and info.data.get("stream"):
            raise ValueError("they are not available when stream is true")  # nor are they in vLLM
        return prompt_logprobs

    @model_validator(mode="after")
    def _asks_for_one_form(self) -> Self:
        if self.structured_outputs and self.response_format and self.response_format.form:
            raise ValueError("response_format and structured_outputs cannot both ask for a form")
        return self

    @model_validator(mode="after")
    def _is_heeded_by_beam_search(self) -> Self:
        """As far as an engine cannot know; it refuses the rest, see SamplingParams."""
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise FieldError("length_penalty", "it needs use_beam_search to be true")
            return self
        if self.stream:
            raise FieldError("stream", "beams are known at the end only, so it must be false")
        if self.stop_strings:
            raise FieldError("stop", "a beam search heeds no stop strings; it does heed stop_token_ids")
        if self.form is not None:
            field = "structured_outputs" if self.structured_outputs else "response_format"
            raise FieldError(field, "a beam search cannot keep to a form")
        if self.max_output_tokens == 0:
            raise FieldError("max_tokens", "a beam search needs at least 1")
        return self

    @property
    def beam_search(self) -> BeamSearch | None:
        return BeamSearch(self.num_sequences, self.length_penalty) if self.use_beam_search else None

    @property
    def form(self) -> StructuredOutput | None:
        """What the output has to look like."""
        asked = self.structured_outputs or self.response_format
        return asked.form if asked is not None else None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives that are wanted beside each token; None: not even its own log-probability."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As `num_logprobs`, of the prompt, wherever in the answer they are wanted."""
        return self.prompt_logprobs

    @property
    def num_prompt_copies(self) -> int:
        """How often the answer tells of each prompt."""
        return 1

    @property
    def num_sequences(self) -> int:
        """That are generated of each prompt."""
        return self.n

    @property
    def num_candidates(self) -> int:
        """Choices among which the best `n` are the answer. A beam search has chosen already."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def max_output_tokens(self) -> int | None:
        """What the client asked for, if it did; 0: nothing but the prompt is wanted."""
        return self.max_tokens

    @property
    def max_output_param(self) -> str:
        """The field that says so."""
        return "max_tokens"

    @property
    def default_output_tokens(self) -> int | None:
        """Otherwise; None: as many as the context allows."""
        return None


class ChatCompletionBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None  # a variable of the template, for models that heed it
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    prompt_cache_retention: Literal["in_memory"] | None = None
    # vLLM's
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _goes_with_logprobs(cls, top_logprobs: int | None, info: ValidationInfo) -> int | None:
        if top_logprobs and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs to be true")
        return top_logprobs

    @model_validator(mode="after")
    def _chooses_among_its_tools(self) -> ChatCompletionBody:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise FieldError("tools", f"two tools are called {twice!r}")
        if self.use_beam_search and any(tool.function.strict for tool in self.tools or ()):
            raise FieldError("tools", "a beam search cannot be held to the schema of a strict tool")
        if self.tool_choice in (None, "none", "auto"):
            return self
        if not names:
            raise FieldError("tool_choice", "it needs tools to choose among")
        if self.only_tool is not None and self.only_tool not in names:
            raise FieldError("tool_choice", f"there is no tool {self.only_tool!r}")
        if self.use_beam_search:
            raise FieldError("tool_choice", "a beam search cannot be held to a call")
        if self.structured_outputs is not None:
            raise FieldError("structured_outputs", "a call that must be made has the form of the call")
        return self

    @model_validator(mode="after")
    def _ends_as_its_last_message_allows(self) -> ChatCompletionBody:
        if self.continue_final_message:
            if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
                raise FieldError("continue_final_message", "it and add_generation_prompt cannot both be true")
            last = self.messages[-1]
            if last.role != "assistant" or last.tool_calls or not last.text:
                raise FieldError("continue_final_message", "the last message must be text of the assistant")
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_what_has_fields_of_its_own(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in variables or ():
            if name in RESERVED_TEMPLATE_VARIABLES:
                raise FieldError(name, "it cannot be set here")
        return variables

    @property
    def only_tool(self) -> str | None:
        """The one that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None

    @property
    def conversation(self) -> Conversation:
        choice: ToolChoice = "auto"
        if self.tool_choice is not None:
            choice = "required" if isinstance(self.tool_choice, NamedToolChoice) else self.tool_choice
        return Conversation(
            [message.for_template() for message in self.messages],
            tools=[tool.tool for tool in self.tools or ()],
            tool_choice=choice,
            only_tool=self.only_tool,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_variables={**self._effort_variables, **(self.chat_template_kwargs or {})},
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            tells_reasoning=self.include_reasoning,
        )

    @property
    def _effort_variables(self) -> dict[str, Any]:
        if self.reasoning_effort is None:
            return {}
        effort = {"reasoning_effort": self.reasoning_effort}
        # Templates of models that can think or not ask for it under this name.
        return {**effort, "enable_thinking": False} if self.reasoning_effort == "none" else effort

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_output_param(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


MAX_SEQUENCES = 128  # that one request may start: prompts times n or best_of


class CompletionBody(GenerationBody):
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)
        ]
    )
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    # not served yet
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _starts_few_sequences(self) -> CompletionBody:
        is_list_of_prompts = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        num_sequences = self.num_sequences * (len(self.prompt) if is_list_of_prompts else 1)
        if num_sequences > MAX_SEQUENCES:
            factor = "n" if self.best_of is None else "best_of"
            message = f"prompts times {factor} may be at most {MAX_SEQUENCES}, not {num_sequences}"
            raise FieldError(factor, message)
        return self

    @model_validator(mode="after")
    def _chooses_among_enough(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < self.n:
            raise FieldError("best_of", f"it must be at least n, which is {self.n}")
        if self.num_candidates > self.n and self.stream:
            raise FieldError("best_of", "the best are known at the end only, so stream must be false")
        return self

    @model_validator(mode="after")
    def _asks_for_something(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "it must be at least 1, unless echo is true")
        if self.max_tokens == 0 and self.min_tokens > 0:
            raise FieldError("min_tokens", "it must be at most max_tokens, which is 0")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((number for number in wanted if number is not None), default=None)

    @property
    def num_prompt_copies(self) -> int:
        return self.n

    @property
    def num_sequences(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def default_output_tokens(self) -> int | None:
        return 16  # OpenAI's


AnyBody = TypeVar("AnyBody", bound=Body)


def check_body(kind: type[AnyBody], document: object) -> AnyBody:
    """The body of a request. Raises ApiError 400 that names the first wrong field."""
    if not isinstance(document, dict):
        raise invalid_request("The request body must be a JSON object.")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _from_validation_error(error) from error


SectionT = TypeVar("SectionT", bound=Section)


def check_section(kind: type[SectionT], document: dict[str, Any]) -> SectionT:
    """A table of the configuration that came by HTTP. Raises ApiError 400 in the same way."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _from_validation_error(error) from error


def _from_validation_error(error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False, include_input=False)
    first = errors[0]
    # A field that may have several forms fails in each of them. The form that was meant is the one whose
    # type was right.
    of_this_field = [each for each in errors if each["loc"][:1] == first["loc"][:1]]
    chosen = next((each for each in of_this_field if not each["type"].endswith("_type")), first)
    # Parts of the location that name a form ("list[...]", "str") mean nothing to a client.
    path = [
        part
        for part in chosen["loc"]
        if isinstance(part, int) or (part.replace("_", "").isalnum() and part not in ("str", "int"))
    ]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if chosen["type"] == "extra_forbidden":
        return invalid_request(f"Unrecognized request argument: {param}", param, "unknown_parameter")
    if chosen["type"] == "missing":
        return invalid_request(f"Missing required parameter: {param}", param, "missing_required_parameter")
    reason = chosen["msg"].removeprefix("Value error, ")
    cause = chosen.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        param = f"{param}.{cause.param}".lstrip(".")
    return invalid_request(f"Invalid value for {param}: {reason}", param or None, "invalid_value")
