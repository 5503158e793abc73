"""How a chat model's turn is planned: the form that it is held to, and who reads its text."""

from __future__ import annotations

from gateway.errors import invalid_request
from gateway.openai.conversation import Conversation
from gateway.openai.schema import GenerationBody
from gateway.openai.turn import Speaker, TurnPlan


def plan_chat_turn(conversation: Conversation, body: GenerationBody, speaker: Speaker) -> TurnPlan:
    """Raises ApiError 400 for what is not served."""
    _refuse_what_is_not_served(conversation)
    return TurnPlan(body.form, body.skip_special_tokens)


def _refuse_what_is_not_served(conversation: Conversation) -> None:
    """An answer that leaves out what was asked would look like a good one."""
    if conversation.tools and conversation.tool_choice != "none":
        raise invalid_request("Tools are not served yet.", "tools", "unsupported_parameter")
    for index, message in enumerate(conversation.messages):
        if message.get("tool_calls"):
            param = f"messages[{index}].tool_calls"
            raise invalid_request("Calls of tools are not served yet.", param, "unsupported_parameter")
    if conversation.continue_final_message:
        param = "continue_final_message"
        raise invalid_request("The last message cannot be continued yet.", param, "unsupported_parameter")
