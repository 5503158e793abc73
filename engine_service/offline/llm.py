"""LLM: many prompts in, all their continuations out, or their embeddings."""

from __future__ import annotations

import contextlib
import queue
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from engine_service.offline.beam_search_request import BeamSearchOutput, BeamSearchRequest
from engine_service.offline.embedding_worker import EmbeddingWorker
from engine_service.offline.engine_worker import EngineWorker
from engine_service.offline.failures import EngineFailedError, GenerationError
from engine_service.offline.model_options import ModelOptions, model_config_of
from engine_service.offline.offline_request import OfflineRequest
from engine_service.offline.pooling_params import PoolingParams
from engine_service.offline.progress import Progress
from engine_service.offline.prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    encode_conversation,
    encode_prompt,
    encode_text,
    list_of_conversations,
    list_of_prompts,
)
from engine_service.offline.request_output import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from engine_service.offline.sampling_params import BeamSearchParams, SamplingParams
from shared.tokenizer import Tokenizer

UseTqdm = bool | Callable[..., Any]
OnChange = Callable[[OfflineRequest], None]
RequestT = TypeVar("RequestT", bound=OfflineRequest)
ParamsOfCall = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model in this process. It may be used from several threads; their requests share the batch.

    It ends with `shutdown`, at the end of a `with` block, or when it is no longer referenced.
    """

    def __init__(self, model: str, **options: Unpack[ModelOptions]) -> None:
        """Loads the model: `package:NAME`, a .gguf file, a Hugging Face directory or a hub id.

        Raises ConfigError for what cannot be loaded or run, and names the option.
        """
        config = model_config_of(model, options)
        self._worker = EmbeddingWorker(config) if config.runner == "pooling" else EngineWorker(config)
        self._close = weakref.finalize(self, self._worker.close)
        self._seeds = random.Random(config.seed)
        self._request_numbers = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ParamsOfCall = None,
        *,
        use_tqdm: UseTqdm = True,
    ) -> list[RequestOutput]:
        """Continues every prompt; the outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`. Without
        parameters SamplingParams() are used; a list of them has one for each prompt.

        Raises TypeError or ValueError, naming `prompts[i]`, before anything is computed;
        GenerationError, which holds all outputs, when the engine refuses one of them later;
        EngineFailedError.
        """
        return self._continue(list_of_prompts(prompts), encode_prompt, "prompts", sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsOfCall = None,
        use_tqdm: UseTqdm = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or each of several, in the model's chat template; else as `generate`."""
        conversations = list_of_conversations(messages)
        return self._continue(conversations, encode_conversation, "messages", sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: UseTqdm = False
    ) -> list[BeamSearchOutput]:
        """The most probable continuations of every prompt, all searched for at once; else as `generate`."""
        if not isinstance(params, BeamSearchParams):
            raise TypeError("params must be BeamSearchParams")

        def make(
            worker: EngineWorker, index: int, prompt: EncodedPrompt, on_change: OnChange
        ) -> BeamSearchRequest:
            return BeamSearchRequest(
                self._next_id(), prompt, params, worker.card, worker.tokenizer, seed=0, on_change=on_change
            )

        requests = self._run(list_of_prompts(prompts), encode_prompt, "prompts", make, use_tqdm)
        return [request.found() for request in requests]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of every prompt, in their order; prompts as for `generate`.

        Needs a model that was loaded with `runner="pooling"`. Raises TypeError or ValueError, naming
        `prompts[i]`, before anything is computed; EngineFailedError.
        """
        worker = self._worker
        if not isinstance(worker, EmbeddingWorker):
            raise ValueError('LLM.embed() needs an embedding model: load it with runner="pooling"')
        dimensions = pooling_params.dimensions if pooling_params is not None else None
        texts = []
        for index, prompt in enumerate(list_of_prompts(prompts)):
            with _naming(f"prompts[{index}]"):
                texts.append(encode_text(prompt, worker.tokenizer).token_ids)
                worker.check(texts[-1], dimensions)
        with Progress(len(texts), use_tqdm) as progress:
            vectors = worker.embed(texts, dimensions, progress.advance)
        return [
            EmbeddingRequestOutput(str(next(self._request_numbers)), EmbeddingOutput(vector), text)
            for vector, text in zip(vectors, texts, strict=True)
        ]

    def get_tokenizer(self) -> Tokenizer:
        """Our own: `encode`, `encode_chat`, `decode`."""
        return self._worker.tokenizer

    def shutdown(self) -> None:
        """Frees the model, after the step that is being computed. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _continue(
        self,
        inputs: Sequence[Any],
        encode: Callable[[Any, Tokenizer], EncodedPrompt],
        field: str,
        sampling_params: ParamsOfCall,
        use_tqdm: UseTqdm,
    ) -> list[RequestOutput]:
        params = _one_for_each(sampling_params, len(inputs))

        def make(
            worker: EngineWorker, index: int, prompt: EncodedPrompt, on_change: OnChange
        ) -> OfflineRequest:
            return OfflineRequest(
                self._next_id(),
                prompt,
                params[index],
                worker.card,
                worker.tokenizer,
                seed=params[index].first_seed(self._seeds),
                on_change=on_change,
            )

        return [request.output() for request in self._run(inputs, encode, field, make, use_tqdm)]

    def _run(
        self,
        inputs: Sequence[Any],
        encode: Callable[[Any, Tokenizer], EncodedPrompt],
        field: str,
        make: Callable[[EngineWorker, int, EncodedPrompt, OnChange], RequestT],
        use_tqdm: UseTqdm,
    ) -> list[RequestT]:
        """A request for each of the inputs, made with its index, until all have ended."""
        worker = self._worker
        if isinstance(worker, EmbeddingWorker):
            raise ValueError("this is an embedding model, which generates nothing: use LLM.embed()")
        done: queue.SimpleQueue[OfflineRequest] = queue.SimpleQueue()

        def on_change(request: OfflineRequest) -> None:
            if request.is_finished:
                done.put(request)

        requests = []
        for index, given in enumerate(inputs):
            with _naming(f"{field}[{index}]"):
                requests.append(make(worker, index, encode(given, worker.tokenizer), on_change))
        worker.submit(requests)
        try:
            _wait(requests, done, use_tqdm)
        finally:
            worker.abort(requests)  # nothing is left of a call that was interrupted
        if any(request.error is not None for request in requests):
            raise GenerationError([request.output() for request in requests])
        return requests

    def _next_id(self) -> str:
        return str(next(self._request_numbers))


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Errors of the user say which of the inputs they are about."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{where}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _one_for_each(params: ParamsOfCall, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise TypeError("sampling_params must be SamplingParams or a list of them")
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params has {len(params)} entries for {num_prompts} prompts")
    return list(params)


def _wait(
    requests: Sequence[OfflineRequest], done: queue.SimpleQueue[OfflineRequest], use_tqdm: UseTqdm
) -> None:
    """Until all have ended. Raises EngineFailedError."""
    with Progress(len(requests), use_tqdm) as progress:
        for _ in requests:
            request = done.get()
            if request.failure is not None:
                raise EngineFailedError(f"the engine has ended: {request.failure}") from request.failure
            progress.advance(request.num_output_tokens)
