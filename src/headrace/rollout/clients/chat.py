"""Turns chat messages into the text of a prompt, and sampled tokens into a reply with its tool calls.

Tool calls are read in the form that most open chat models write: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``,
with one call or a list of them inside.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import DataError
from headrace.rollout.environments.single_turn import SingleTurn
from headrace.types import Generation

CALL_OPENS = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Reply:
    """content: the text beside the tool calls; tool_calls: as in OpenAI's API; finish_reason: stop, length or tool_calls."""

    content: str
    tool_calls: tuple[dict[str, Any], ...]
    finish_reason: str

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.tool_calls:
            return {**message, "tool_calls": list(self.tool_calls)}
        return {**message, "content": self.content}


class ChatFormat:
    """The model's tokenizer and chat template, both ways."""

    def __init__(self, environment: SingleTurn) -> None:
        self.environment, self.tokenizer = environment, environment.tokenizer
        self.ends = {end: self.tokenizer.convert_ids_to_tokens(end) for end in environment.end_token_ids}

    def render(self, messages: Sequence[dict[str, Any]], tools: Any) -> str:
        """The prompt's text, open for the next reply; a last message by the assistant is continued."""
        if not self.tokenizer.chat_template:
            raise DataError("the model has no chat template; use /v1/completions, or a model tuned for chat")
        goes_on = bool(messages) and messages[-1]["role"] == "assistant"
        try:
            return self.tokenizer.apply_chat_template(
                [_for_template(message) for message in messages],
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
            )
        except Exception as error:  # templates are programs that come with a model, and raise what they like
            line = " ".join(str(error).split())
            raise DataError(f"the chat template refused the messages: {line:.200}") from error

    def encode(self, text: str) -> list[int]:
        return self.environment.encode(text)

    def encode_first(self, text: str) -> list[int]:
        """Raw text, with what the tokenizer itself puts before it."""
        return self.environment.raw_ids(text)

    def text(self, generation: Generation) -> str:
        """Without the end token, or the stop string that ended it."""
        return self.cut(self.environment.decode(generation.token_ids.tolist()), generation)

    def cut(self, text: str, generation: Generation) -> str:
        stop = generation.matched_stop
        return text[: text.rfind(stop)] if isinstance(stop, str) and stop in text else text

    def reply(self, generation: Generation, tools: Any) -> Reply:
        text = self.text(generation)
        calls = read_tool_calls(text) if tools else ()
        content = _CALL.sub("", text).rstrip() if calls else text
        reason = "tool_calls" if calls else "length" if generation.finish_reason == "length" else "stop"
        return Reply(content, calls, reason)


def read_tool_calls(text: str) -> tuple[dict[str, Any], ...]:
    """OpenAI's form of the calls in a reply; none when one of them cannot be read: the client then sees the text."""
    calls = []
    for inside in _CALL.findall(text):
        try:
            found = json.loads(inside)
        except (ValueError, RecursionError):
            return ()
        for call in found if isinstance(found, list) else [found]:
            if not isinstance(call, dict) or not isinstance(call.get("name"), str):
                return ()
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
            calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
    return tuple(calls)


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Templates expect the arguments of a call as an object, the API sends them as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "content": message.get("content") or "", "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function}
