"""What makes two requests share a prefix worth routing by: the hash that the balancer goes by.

Only what tells conversations apart is hashed, and only what stays the same over their turns: for a
chat everything up to the first message of the user, for a plain prompt its first blocks. A system
prompt that all conversations share therefore does not send them all to one engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

MAX_HASHED_CHARACTERS = 1024  # of one message: requests that share a long document still meet
MAX_HASHED_TOKENS = 64  # of a plain prompt: few enough that a prompt which grows keeps its hash


def conversation_hash(cache_salt: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Equal for all turns of a conversation."""
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=16)
    for message in messages:
        part = f"\0{message['role']}\0{str(message['content'])[:MAX_HASHED_CHARACTERS]}"
        digest.update(part.encode())
        if message["role"] == "user":
            break
    return digest.hexdigest()


def prompt_hash(cache_salt: str, prompt_token_ids: Sequence[int]) -> str:
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=16)
    digest.update(repr(list(prompt_token_ids[:MAX_HASHED_TOKENS])).encode())
    return digest.hexdigest()
