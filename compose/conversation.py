"""A chat of several turns with a stack."""

from __future__ import annotations

from collections.abc import Generator

from compose.gateway_client import GatewayClient


class Conversation:
    """Keeps the messages; each question is asked with all that was said before."""

    def __init__(
        self,
        client: GatewayClient,
        model: str,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        system: str | None = None,
    ) -> None:
        self.model = model
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self._client = client
        self._settings = {"max_tokens": max_tokens, "temperature": temperature}

    def ask(self, question: str) -> Generator[str, None, None]:
        """The pieces of the answer. Raises GatewayError.

        Closing the generator early ends the request; the part that came stays in the conversation.
        If nothing came, the question is taken back, so that it can be asked again.
        """
        self.messages.append({"role": "user", "content": question})
        answer: list[str] = []
        body = {"model": self.model, "messages": list(self.messages), **self._settings}
        events = self._client.stream("/v1/chat/completions", body)
        try:
            for event in events:
                for choice in event["choices"]:  # none in an event that only tells the usage
                    if piece := choice["delta"].get("content"):
                        answer.append(piece)
                        yield piece
        finally:
            events.close()
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()
