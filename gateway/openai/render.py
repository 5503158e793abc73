"""`POST .../render`: what a completion would send to the model, without running it.

The answer is vLLM's `GenerateRequest`, with the text of the prompt besides; of plain completions a list with
one for each prompt. Whatever a gateway refuses of the real request it refuses here, limits included. What
only an engine can tell, such as a grammar that does not compile, comes with the real request.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from aiohttp import web

from gateway.generation import GenerationPlan
from gateway.openai.api import BodyT, WishT
from gateway.openai.attempt import Attempt
from gateway.openai.endpoint import GenerationEndpoint
from gateway.openai.schema import CompletionBody, GenerationBody
from shared.identifiers import fresh_request_id
from shared.sampling import StructuredOutput
from shared.tokenizer import Tokenizer

# The others have vLLM's name and meaning.
_TOLD_IN_ANOTHER_FORM = ("seed", "max_tokens", "structured_output", "bad_words", "beam_search")


class RenderEndpoint(GenerationEndpoint[BodyT, WishT]):
    _is_for_engine = False

    async def _answer(self, attempt: Attempt[BodyT, WishT]) -> web.StreamResponse:
        admitted, wish, plan = attempt.admitted, attempt.wish, attempt.plan
        tokenizer, model = admitted.engine.tokenizer, admitted.route.name
        async with self._admission.running(admitted):
            document = await admitted.encode(lambda: _document(wish, plan, tokenizer, model))
            return web.Response(
                body=document, content_type="application/json", headers=admitted.answer_headers()
            )


def _document(wish: GenerationBody, plan: GenerationPlan, tokenizer: Tokenizer, model: str) -> bytes:
    options = wish.stream_options
    common = {
        "model": model,
        "sampling_params": _sampling_params(wish, plan),
        "features": None,  # vLLM's, of images
        "stream": wish.stream,
        "stream_options": None if options is None else options.model_dump(mode="json"),
        "cache_salt": wish.cache_salt,
        "priority": plan.priority,
    }
    requests = [
        {
            "request_id": fresh_request_id(),
            "prompt": tokenizer.decode(prompt.token_ids, skip_special_tokens=False),
            "token_ids": prompt.token_ids,
            **common,
        }
        for prompt in plan.prompts
    ]
    return msgspec.json.encode(requests if isinstance(wish, CompletionBody) else requests[0])


def _sampling_params(wish: GenerationBody, plan: GenerationPlan) -> dict[str, Any]:
    """In effect: with the values that stand where the client left a field out."""
    sampling = plan.sampling
    fields = {
        name: getattr(sampling, name)
        for name in sampling.__struct_fields__
        if name not in _TOLD_IN_ANOTHER_FORM
    }
    return {
        **fields,
        "n": plan.num_choices,
        "max_tokens": sampling.max_tokens if plan.keeps_output else 0,
        "seed": None if wish.seed is None else sampling.seed,  # None: each request draws one
        "stop": list(plan.stop),
        "include_stop_str_in_output": plan.include_stop_in_output,
        "skip_special_tokens": plan.skip_special_tokens,
        "bad_words": wish.bad_words,
        "structured_outputs": _structured_outputs(sampling.structured_output),
        "use_beam_search": sampling.beam_search is not None,
        "length_penalty": wish.length_penalty,
    }


def _structured_outputs(form: StructuredOutput | None) -> dict[str, Any] | None:
    if form is None:
        return None
    match form.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": form.text}
        case "choice":
            return {"choice": json.loads(form.text)}
        case "schemas":
            return {"grammar": form.text}
        case _:
            return {form.kind: form.text}
