"""How a chat model's turn is planned: the form that it is held to, and who reads its text."""

from __future__ import annotations

from gateway.openai.conversation import Conversation
from gateway.openai.schema import GenerationBody
from gateway.openai.turn import Speaker, TurnPlan


def plan_chat_turn(conversation: Conversation, body: GenerationBody, speaker: Speaker) -> TurnPlan:
    return TurnPlan(body.form, body.skip_special_tokens)
