"""An engine that answers each request at once, with the default model's tokenizer and chat template: what is
measured is the gateway, which does all that it does for a real one."""

from __future__ import annotations

from multiprocessing.connection import Connection

from engine_service.loaders.gguf_file import GgufFile
from engine_service.loaders.gguf_text import read_text_bundle
from engine_service.model_source import resolve_source
from loadtest.simulator.wire_engine import WireEngine
from shared.config import DEFAULT_MODEL_SOURCE
from shared.messages import ModelCard, SequenceUpdate, Submit
from shared.redis_schema import RedisKeys

WORDS = range(1000, 1016)  # tokens of the default model that are text


def run(
    model: str, address: str, redis_url: str, namespace: str, num_messages: int, control: Connection
) -> None:
    """Until anything comes over `control`. The tokens of an answer come in so many messages, if there are as
    many."""
    with GgufFile(resolve_source(DEFAULT_MODEL_SOURCE).path) as file:
        text_bundle = read_text_bundle(file)
    card = ModelCard(model, "Instant", 49152, 2048, 64, 16, 1000, "float32", [2])
    engine = InstantEngine(
        address, redis_url, RedisKeys(namespace), model, text_bundle=text_bundle, card=card
    )
    engine.num_messages = num_messages
    control.send("listening")
    while not control.poll():
        if engine.poll(100):
            engine.receive()
        engine.beat()
    control.recv()
    engine.close()


class InstantEngine(WireEngine):
    num_messages = 1

    def on_submit(self, gateway: bytes, submit: Submit) -> None:
        """Each message but the last has one token, as of a decoding step."""
        num_tokens = submit.sampling.max_tokens
        token_ids = [WORDS[number % len(WORDS)] for number in range(num_tokens)]
        num_single = min(self.num_messages, num_tokens) - 1
        self.num_running = 1
        for token_id in token_ids[:num_single]:
            self.num_steps += 1
            self.say(gateway, [SequenceUpdate(submit.request_id, [token_id])])
        self.num_running = 0
        self.say(gateway, [SequenceUpdate(submit.request_id, token_ids[num_single:], "length")])
