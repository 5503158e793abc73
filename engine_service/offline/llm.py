"""LLM: many prompts in, all their continuations out."""

from __future__ import annotations

import queue
import random
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Self, Unpack

from engine_service.offline.engine_worker import EngineWorker
from engine_service.offline.failures import EngineFailedError, GenerationError
from engine_service.offline.model_options import ModelOptions, model_config_of
from engine_service.offline.offline_request import OfflineRequest
from engine_service.offline.progress import Progress
from engine_service.offline.prompts import (
    Conversation,
    EncodedPrompt,
    Prompt,
    encode_conversation,
    encode_prompt,
    list_of_conversations,
    list_of_prompts,
)
from engine_service.offline.request_output import RequestOutput
from engine_service.offline.sampling_params import SamplingParams
from shared.tokenizer import Tokenizer

UseTqdm = bool | Callable[..., Any]
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
        self._worker = EngineWorker(config)
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
        return self._run(list_of_prompts(prompts), encode_prompt, "prompts", sampling_params, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsOfCall = None,
        use_tqdm: UseTqdm = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or each of several, in the model's chat template; else as `generate`."""
        conversations = list_of_conversations(messages)
        return self._run(conversations, encode_conversation, "messages", sampling_params, use_tqdm)

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

    def _run(
        self,
        inputs: Sequence[Any],
        encode: Callable[[Any, Tokenizer], EncodedPrompt],
        field: str,
        sampling_params: ParamsOfCall,
        use_tqdm: UseTqdm,
    ) -> list[RequestOutput]:
        params = _one_for_each(sampling_params, len(inputs))
        done: queue.SimpleQueue[OfflineRequest] = queue.SimpleQueue()
        requests = []
        for index, (given, own_params) in enumerate(zip(inputs, params, strict=True)):
            where = f"{field}[{index}]"
            try:
                requests.append(self._make_request(encode(given, self._worker.tokenizer), own_params, done))
            except TypeError as error:
                raise TypeError(f"{where}: {error}") from error
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        self._worker.submit(requests)
        try:
            _wait(requests, done, use_tqdm)
        finally:
            self._worker.abort(requests)  # nothing is left of a call that was interrupted
        outputs = [request.output() for request in requests]
        if any(output.error is not None for output in outputs):
            raise GenerationError(outputs)
        return outputs

    def _make_request(
        self, prompt: EncodedPrompt, params: SamplingParams, done: queue.SimpleQueue[OfflineRequest]
    ) -> OfflineRequest:
        def on_change(request: OfflineRequest) -> None:
            if request.is_finished:
                done.put(request)

        return OfflineRequest(
            str(next(self._request_numbers)),
            prompt,
            params,
            self._worker.card,
            self._worker.tokenizer,
            seed=params.first_seed(self._seeds),
            on_change=on_change,
        )


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
            progress.advance(sum(len(each.token_ids) for each in request.continuations.values()))
