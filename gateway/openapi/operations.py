"""Every operation that clients may use. A test compares them with the application's routes."""

from __future__ import annotations

from gateway.anthropic.body import CountTokensBody, MessagesBody
from gateway.anthropic.dialect import ANTHROPIC, OVERLOADED
from gateway.openai.embeddings_body import EmbeddingsBody
from gateway.openai.feedback import FeedbackBody
from gateway.openai.responses.body import ResponsesBody
from gateway.openai.responses.stored import DEFAULT_LIMIT, MAX_LIMIT
from gateway.openai.schema import ChatCompletionBody, CompletionBody
from gateway.openai.scoring_body import RerankBody, ScoreBody
from gateway.openai.tokenization_body import DetokenizeBody, TokenizeChatBody, TokenizePromptBody
from gateway.openapi.admin_operations import ADMIN_OPERATIONS
from gateway.openapi.answers.embeddings import EmbeddingList, Ranking, ScoreList
from gateway.openapi.answers.feedback import Feedback
from gateway.openapi.answers.generation import ChatCompletion, Completion
from gateway.openapi.answers.messages import MessageAnswer, MessageErrorAnswer, TokenCount
from gateway.openapi.answers.models import ModelEntry, ModelInfo, ModelList, ModelPage
from gateway.openapi.answers.operation import Health, Readiness
from gateway.openapi.answers.responses import DeletedResponse, InputItemList, InputTokens, Response
from gateway.openapi.answers.tokens import DetokenizedText, RenderedRequest, Tokens
from gateway.openapi.operation import (
    BODY_ERRORS,
    KEY_ERRORS,
    MODEL_ERRORS,
    TEXT_ERRORS,
    Access,
    Operation,
)

GENERATION = "Generation"
EMBEDDINGS = "Embeddings"
RESPONSES = "Responses"
MESSAGES = "Messages"
TEXT = "Text and tokens"
FEEDBACK = "Feedback"
MODELS = "Models"
OPERATION = "Operation"

_RESPONSE_ID = {"response_id": "As the response that was created told it."}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "createChatCompletion",
        GENERATION,
        "Answer a conversation.",
        body=ChatCompletionBody,
        streams=True,
        answers={200: ChatCompletion},
        errors=MODEL_ERRORS,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "createCompletion",
        GENERATION,
        "Continue texts.",
        body=CompletionBody,
        streams=True,
        answers={200: Completion},
        errors=MODEL_ERRORS,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "createEmbedding",
        EMBEDDINGS,
        "Turn texts into vectors.",
        body=EmbeddingsBody,
        answers={200: EmbeddingList},
        errors=MODEL_ERRORS,
    ),
    Operation(
        "POST",
        "/v1/score",
        "createScore",
        EMBEDDINGS,
        "Say how alike texts are.",
        aliases=("/score",),
        body=ScoreBody,
        answers={200: ScoreList},
        errors=MODEL_ERRORS,
    ),
    Operation(
        "POST",
        "/v1/rerank",
        "createRanking",
        EMBEDDINGS,
        "Order documents by how alike a query they are.",
        aliases=("/rerank", "/v2/rerank"),
        body=RerankBody,
        answers={200: Ranking},
        errors=MODEL_ERRORS,
    ),
    Operation(
        "POST",
        "/v1/responses",
        "createResponse",
        RESPONSES,
        "Answer a turn of a conversation that the server remembers.",
        body=ResponsesBody,
        streams=True,
        answers={200: Response},
        errors=MODEL_ERRORS,
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "countInputTokens",
        RESPONSES,
        "Tell how many tokens the prompt of a response would have.",
        body=ResponsesBody,
        answers={200: InputTokens},
        errors=TEXT_ERRORS,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}",
        "retrieveResponse",
        RESPONSES,
        "Tell a stored response.",
        parameters=_RESPONSE_ID,
        query={"stream": {"type": "boolean", "const": False, "default": False}},
        answers={200: Response},
        errors=(400, *KEY_ERRORS, 404),
    ),
    Operation(
        "DELETE",
        "/v1/responses/{response_id}",
        "deleteResponse",
        RESPONSES,
        "Forget a stored response.",
        parameters=_RESPONSE_ID,
        answers={200: DeletedResponse},
        errors=(*KEY_ERRORS, 404),
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        "listInputItems",
        RESPONSES,
        "List what a stored response was made from.",
        parameters=_RESPONSE_ID,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
            "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
            "after": {"type": "string", "description": "The id of an item: only those behind it."},
        },
        answers={200: InputItemList},
        errors=(400, *KEY_ERRORS, 404),
    ),
    Operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        "cancelResponse",
        RESPONSES,
        "Cancel a response that is being made in the background; tell it as it is if it has ended.",
        parameters=_RESPONSE_ID,
        answers={200: Response},
        errors=(400, *KEY_ERRORS, 404),
    ),
    Operation(
        "POST",
        "/v1/messages",
        "createMessage",
        MESSAGES,
        "Answer a conversation, in the form of Anthropic's Messages API.",
        body=MessagesBody,
        streams=True,
        answers={200: MessageAnswer},
        errors=(*MODEL_ERRORS, OVERLOADED),
        error=MessageErrorAnswer,
        id_headers=ANTHROPIC.id_headers,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "countMessageTokens",
        MESSAGES,
        "Tell how many tokens the prompt of a message would have.",
        body=CountTokensBody,
        answers={200: TokenCount},
        errors=TEXT_ERRORS,
        error=MessageErrorAnswer,
        id_headers=ANTHROPIC.id_headers,
    ),
    Operation(
        "POST",
        "/v1/chat/completions/render",
        "renderChatCompletion",
        TEXT,
        "Tell what a chat completion would send to the model.",
        body=ChatCompletionBody,
        answers={200: RenderedRequest},
        errors=TEXT_ERRORS,
    ),
    Operation(
        "POST",
        "/v1/completions/render",
        "renderCompletion",
        TEXT,
        "Tell what a completion would send to the model, for each of its prompts.",
        body=CompletionBody,
        answers={200: list[RenderedRequest]},
        errors=TEXT_ERRORS,
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        TEXT,
        "Turn a text or a conversation into tokens.",
        aliases=("/v1/tokenize",),
        body=TokenizePromptBody | TokenizeChatBody,
        answers={200: Tokens},
        errors=TEXT_ERRORS,
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        TEXT,
        "Turn tokens into text.",
        aliases=("/v1/detokenize",),
        body=DetokenizeBody,
        answers={200: DetokenizedText},
        errors=TEXT_ERRORS,
    ),
    Operation(
        "POST",
        "/v1/feedback",
        "createFeedback",
        FEEDBACK,
        "Score an answer that was a part of an experiment.",
        body=FeedbackBody,
        answers={200: Feedback},
        errors=(*BODY_ERRORS, *KEY_ERRORS, 404),
    ),
    Operation(
        "GET",
        "/v1/models",
        "listModels",
        MODELS,
        "List the names that this key may send as `model`.",
        answers={200: ModelList | ModelPage},
        errors=KEY_ERRORS,
    ),
    Operation(
        "GET",
        "/v1/models/{name}",
        "retrieveModel",
        MODELS,
        "Tell about one of these names.",
        parameters={"name": "The name; it may hold slashes, encoded or not."},
        answers={200: ModelEntry | ModelInfo},
        errors=(*KEY_ERRORS, 404),
    ),
    Operation(
        "GET",
        "/livez",
        "getLiveness",
        OPERATION,
        "Say that this process lives.",
        access=Access.OPEN,
        texts=(200,),
    ),
    Operation(
        "GET",
        "/readyz",
        "getReadiness",
        OPERATION,
        "Say whether every model has an engine that takes requests.",
        access=Access.OPEN,
        answers={200: Readiness, 503: Readiness},
    ),
    Operation(
        "GET",
        "/health",
        "getHealth",
        OPERATION,
        "Say whether engines make progress.",
        access=Access.OPEN,
        answers={200: Health, 503: Health},
    ),
    Operation(
        "GET",
        "/metrics",
        "getMetrics",
        OPERATION,
        "Tell the figures of this gateway in Prometheus' text format.",
        access=Access.OPEN,
        texts=(200,),
    ),
    Operation(
        "GET",
        "/openapi.json",
        "getOpenApi",
        OPERATION,
        "This document.",
        access=Access.OPEN,
        answers={200: dict[str, object]},
    ),
    *ADMIN_OPERATIONS,
)
