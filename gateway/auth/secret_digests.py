"""The digests of secrets that are used again and again, without the secrets."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict

from shared.api_keys import digest_of

MAX_REMEMBERED = 16_384


class SecretDigests:
    """HMAC-SHA-256 takes OpenSSL longer than all else of an authentication. What was asked for lately is
    found under a hash of its own, keyed with a secret of this process (BLAKE2b, RFC 7693, which is a keyed
    hash by itself), so that no secret of a client is kept in memory."""

    def __init__(self, pepper: bytes) -> None:
        self._pepper = pepper
        self._own_key = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def of(self, secret: str) -> str:
        """As `digest_of`."""
        data = secret.encode("utf-8", "surrogatepass")
        name = hashlib.blake2b(data, digest_size=32, key=self._own_key).digest()
        digest = self._known.get(name)
        if digest is None:
            digest = self._known[name] = digest_of(secret, self._pepper)
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return digest
