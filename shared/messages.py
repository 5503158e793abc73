"""The wire between gateway and engine, over ZeroMQ.

A message is two frames: one byte of `MessageType`, then one msgpack array. The type stands outside
the payload so that a receiver can pick out an abort without decoding anything else. Arrays are
positional; a new field goes to the end of its struct with a default, so that an older peer ignores
it and a newer one fills it in.

The engine binds a ROUTER, each gateway process connects a DEALER to each engine:

    gateway                              engine
      GATEWAY_HELLO  ------------------>   (who I am, which text bundles I hold)
      <------------------  ENGINE_HELLO    (model card, epoch, text bundle if unknown)
      SUBMIT, ABORT  ------------------>   (or EMBED, to an engine whose card says so)
      RESET_PREFIX_CACHE  ------------->
      <------  STEP, REJECT, HEARTBEAT     (one STEP per engine step for all requests of a gateway)
      <----------------------- EMBEDDED    (one for each EMBED)
      <-------------------  BYE | DEAD     (draining | last words)
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, cast

import msgspec

from shared.identifiers import EngineEpoch, EngineId, GatewayId, RequestId, TenantId
from shared.sampling import SamplingParams
from shared.text_bundle import TextBundle

PROTOCOL_VERSION = 1

FinishReason = Literal["stop", "length", "abort"]
RejectCode = Literal[
    "queue_full",
    "invalid_request",
    "context_length_exceeded",
    "draining",
    "internal_error",
    "timed_out",  # only of an Embed, so that gateways which know neither never see it
]


class MessageType(IntEnum):
    GATEWAY_HELLO = 1
    SUBMIT = 2
    ABORT = 3
    EMBED = 4
    RESET_PREFIX_CACHE = 5
    ENGINE_HELLO = 16
    STEP = 17
    REJECT = 18
    HEARTBEAT = 19
    BYE = 20
    DEAD = 21
    EMBEDDED = 22

    @property
    def frame(self) -> bytes:
        return bytes((self.value,))


class Message(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Base of everything on the wire."""


class GatewayHello(Message, frozen=True):
    protocol_version: int
    gateway_id: GatewayId
    known_bundles: list[str] = []  # content hashes of text bundles that need not be sent again


class Submit(Message, frozen=True):
    """Run one sequence."""

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    tenant: TenantId
    priority: int = 1  # 0 interactive, 1 standard, 2 batch, to 9 at the most
    timeout_s: float | None = None  # from receipt: clocks of two machines are never compared
    cache_salt: str = ""  # requests share cached prefixes only under an equal salt
    trace_context: dict[str, str] = {}  # W3C traceparent and tracestate
    output_token_ids: list[int] = []  # already generated elsewhere: continue after these
    # A request that was submitted before, with the same prompt and salt: wait for it.
    shares_prompt_with: RequestId | None = None


class Abort(Message, frozen=True):
    request_ids: list[RequestId]


class Embed(Message, frozen=True):
    """Turn texts into vectors, one for each."""

    request_id: RequestId
    token_id_lists: list[list[int]]  # of each text, whatever special tokens its model wants among them
    tenant: TenantId
    priority: int = 1  # as in Submit
    timeout_s: float | None = None  # from receipt
    trace_context: dict[str, str] = {}
    dimensions: int | None = None  # so many of each vector, scaled as the model's own are; None: all


class ResetPrefixCache(Message, frozen=True):
    """Forget what is cached, for requests to come. Not answered."""


class ModelCard(Message, frozen=True):
    name: str
    architecture: str
    vocab_size: int
    max_model_len: int  # prompt and output together, in tokens
    max_num_seqs: int
    block_size: int  # tokens per KV block
    num_blocks: int
    dtype: str
    eos_token_ids: list[int]
    runner: str = "generate"  # what it serves: "generate" takes Submit, "pooling" takes Embed
    embedding_dim: int = 0  # numbers in a vector
    # To how many numbers a vector may be shortened; empty: to any; None: the model was not trained for it.
    matryoshka_dimensions: list[int] | None = None


class EngineHello(Message, frozen=True):
    protocol_version: int
    engine_id: EngineId
    epoch: EngineEpoch
    model: ModelCard
    text_bundle_hash: str
    text_bundle: TextBundle | None = None  # None when the gateway said that it holds this hash


class EngineLoad(Message, frozen=True):
    """State of an engine after a step. The first five and the last four are gauges, the others count from the
    epoch's start."""

    num_running: int
    num_waiting: int
    num_free_blocks: int  # cached but unreferenced blocks count as free
    num_blocks: int
    outstanding_tokens: int  # prompt and output tokens still to be computed for accepted requests
    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # in tokens
    prefix_cache_hits: int = 0  # in tokens
    max_num_seqs_now: int = 0  # sequences that may run at once; 0: not told
    max_num_tokens_now: int = 0  # tokens that the last step might have computed; 0: not told
    decode_step_p95_ms: float = 0.0  # of the last 100 steps in which somebody decoded; 0: not measured
    meets_itl_target: bool | None = None  # whether that is within target_itl_ms; None: there is no target


class TokenLogprobs(Message, frozen=True):
    """Of one position, by the model's own distribution: before temperature, penalties and masks."""

    token_id: int
    logprob: float
    rank: int  # of the chosen token, from 1; equals share the better one
    top: list[tuple[int, float]] = []  # most likely tokens and theirs, descending


class Beam(Message, frozen=True):
    """One of the continuations that a beam search has found."""

    token_ids: list[int]  # the one that ended it included
    cumulative_logprob: float  # the sum over these
    finish_reason: FinishReason
    stop_token_id: int | None = None  # as in SequenceUpdate


class SequenceUpdate(Message, frozen=True):
    """What one step added to one sequence.

    `new_token_ids` holds every token that was generated, the one that ended the sequence included. A beam
    search has none: one update, after its first token, says that it has begun, and the last one has `beams`.
    """

    request_id: RequestId
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # set when an end-of-sequence or stop token ended it
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; told with the first token
    logprobs: list[TokenLogprobs] = []  # one for each of new_token_ids; empty unless asked for
    # of the prompt's tokens but the first, which nothing comes before; told with the first update
    prompt_logprobs: list[TokenLogprobs] = []
    beams: list[Beam] = []  # best first


class StepResult(Message, frozen=True):
    updates: list[SequenceUpdate]
    load: EngineLoad


class Embedded(Message, frozen=True):
    """The vectors of one Embed, in the order of its texts."""

    request_id: RequestId
    vectors: bytes  # float32, little-endian, one vector behind the other
    dim: int  # numbers in each of them
    load: EngineLoad


class Reject(Message, frozen=True):
    """One request failed; the others are not concerned."""

    request_id: RequestId
    code: RejectCode
    message: str
    param: str | None = None


class Heartbeat(Message, frozen=True):
    epoch: EngineEpoch
    load: EngineLoad


class Bye(Message, frozen=True):
    """The engine takes no more requests and ends when the accepted ones have."""

    epoch: EngineEpoch


class Dead(Message, frozen=True):
    """The engine's step loop failed; nothing that was accepted will be answered."""

    epoch: EngineEpoch
    reason: str


FromGateway = GatewayHello | Submit | Abort | Embed | ResetPrefixCache
FromEngine = EngineHello | StepResult | Reject | Heartbeat | Bye | Dead | Embedded

_TYPE_OF: dict[type[Message], MessageType] = {
    GatewayHello: MessageType.GATEWAY_HELLO,
    Submit: MessageType.SUBMIT,
    Abort: MessageType.ABORT,
    Embed: MessageType.EMBED,
    ResetPrefixCache: MessageType.RESET_PREFIX_CACHE,
    EngineHello: MessageType.ENGINE_HELLO,
    StepResult: MessageType.STEP,
    Reject: MessageType.REJECT,
    Heartbeat: MessageType.HEARTBEAT,
    Bye: MessageType.BYE,
    Dead: MessageType.DEAD,
    Embedded: MessageType.EMBEDDED,
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {kind.value: msgspec.msgpack.Decoder(cls) for cls, kind in _TYPE_OF.items()}


class ProtocolError(Exception):
    """A peer sent something that is not a message of this protocol."""


def encode(message: FromGateway | FromEngine) -> list[bytes]:
    """The frames of a message."""
    return [_TYPE_OF[type(message)].frame, _ENCODER.encode(message)]


def decode(frames: list[bytes]) -> FromGateway | FromEngine:
    """The message of two frames. Raises ProtocolError."""
    if len(frames) != 2 or len(frames[0]) != 1:
        raise ProtocolError(f"expected a type byte and a payload, got {len(frames)} frames")
    decoder = _DECODERS.get(frames[0][0])
    if decoder is None:
        raise ProtocolError(f"unknown message type {frames[0][0]}")
    try:
        message = cast("FromGateway | FromEngine", decoder.decode(frames[1]))
    except msgspec.DecodeError as error:  # ValidationError is one of these
        raise ProtocolError(f"{MessageType(frames[0][0]).name}: {error}") from error
    return message
