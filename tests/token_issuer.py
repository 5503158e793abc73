"""An issuer of JSON Web Tokens on loopback: its keys can be rotated, and it can be made to fail."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

AUDIENCE = "headrace"


class TokenIssuer:
    """Use as a context manager. `url` is its name, too."""

    def __init__(self) -> None:
        self.num_fetches = 0
        self.answer: bytes | None = None  # in the place of the keys
        self.padding = b""  # before them
        self.status = 200  # of the keys; 302 leads to where they are
        self._keys: dict[str, tuple[str, Any]] = {}  # algorithm and private key, by `kid`
        self.published: list[dict[str, Any]] = []
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, document = issuer._respond(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(document)))
                if status == 302:
                    self.send_header("Location", issuer.url + "/moved")
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # who has read enough of it may leave
                    self.wfile.write(document)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.jwks_url = self.url + "/jwks"
        self.claimed_issuer = self.url

    def __enter__(self) -> TokenIssuer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add_key(self, key_id: str, algorithm: str = "ES256", *, is_published: bool = True) -> None:
        private: Any
        if algorithm.startswith("ES"):
            private = ec.generate_private_key(ec.SECP256R1())
            public = json.loads(ECAlgorithm.to_jwk(private.public_key()))
        else:
            private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            public = json.loads(RSAAlgorithm.to_jwk(private.public_key()))
        self._keys[key_id] = (algorithm, private)
        if is_published:
            self.published.append({**public, "kid": key_id, "use": "sig"})

    def remove_key(self, key_id: str) -> None:
        """From what it publishes; it still signs with it."""
        self.published = [key for key in self.published if key["kid"] != key_id]

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Those of a good token; None takes one away."""
        now = int(time.time())
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "ann", "exp": now + 300, "iat": now, **changes}
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, key_id: str, *, headers: dict[str, Any] | None = None, **changes: Any) -> str:
        algorithm, private = self._keys[key_id]
        return jwt.encode(
            self.claims(**changes), private, algorithm, headers={"kid": key_id, **(headers or {})}
        )

    def private_key(self, key_id: str) -> Any:
        return self._keys[key_id][1]

    def _respond(self, path: str) -> tuple[int, bytes]:
        if path == "/.well-known/openid-configuration":
            document = {"issuer": self.claimed_issuer, "jwks_uri": self.jwks_url}
            return 200, json.dumps(document).encode()
        self.num_fetches += 1
        if self.answer is not None:
            return self.status, self.answer
        status = 200 if path == "/moved" else self.status
        return status, self.padding + json.dumps({"keys": self.published}).encode()
