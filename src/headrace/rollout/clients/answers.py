"""Turns one validated request into its prompt, the generation, and the answer in OpenAI's form, whole or in pieces."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

from headrace.rollout.clients import wire
from headrace.rollout.clients.chat import CALL_OPENS, ChatFormat, Reply
from headrace.rollout.clients.dialogue import Dialogue, Prompt, message_key
from headrace.rollout.clients.rollout import ClientRollout, Session
from headrace.rollout.clients.wire import ApiError
from headrace.types import Generation

UNFINISHED = "\ufffd"
"""What decoding gives for a character of which some bytes are still to come."""


class Answer:
    """What chat and completions have in common. session None: nothing is remembered, every prompt is made anew."""

    kind = chunk_kind = ""

    def __init__(
        self, rollout: ClientRollout, format: ChatFormat, session: Session | None, asked: Any, model: str
    ) -> None:
        self.rollout, self.format, self.session, self.asked, self.model = rollout, format, session, asked, model
        self.id = f"{self.kind[:8]}-{secrets.token_hex(12)}"
        self.sampling = asked.params(rollout.sampling, trained=session is not None)
        self.dialogue = session.dialogue if session is not None else Dialogue(format.ends)
        self.prompt = self.make_prompt()

    def make_prompt(self) -> Prompt:
        raise NotImplementedError

    def keep(self, generation: Generation) -> Any:
        """Remember the turn; what the choice is made from."""
        raise NotImplementedError

    def choice(self, kept: Any, generation: Generation) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, text: str, first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def last(self, kept: Any, generation: Generation) -> dict[str, Any]:
        """The last piece's choice, after all text."""
        raise NotImplementedError

    async def whole(self) -> dict[str, Any]:
        generation = await self.rollout.answer(self.session, self.prompt.ids, self.sampling)
        choice = self._with_facts(self.choice(self.keep(generation), generation), generation)
        return self._around(self.kind, [choice], generation)

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """Text as it becomes certain, then one piece with the reason of the end, tool calls and token facts."""
        pieces: asyncio.Queue[Generation | None] = asyncio.Queue()
        asking = asyncio.create_task(
            self.rollout.answer(self.session, self.prompt.ids, self.sampling, pieces.put_nowait)
        )
        asking.add_done_callback(lambda _: pieces.put_nowait(None))
        ids: list[int] = []
        sent, first = 0, True
        try:
            while (piece := await pieces.get()) is not None:
                ids.extend(piece.token_ids.tolist())
                text = self._certain(self.format.environment.decode(ids))
                if len(text) > sent:
                    yield self._around(self.chunk_kind, [self.delta(text[sent:], first)])
                    sent, first = len(text), False
            generation = asking.result()
            kept = self.keep(generation)
            if rest := self.shown(kept)[sent:]:
                yield self._around(self.chunk_kind, [self.delta(rest, first)])
            last = self._with_facts(self.last(kept, generation), generation)
            yield self._around(self.chunk_kind, [last], generation)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def shown(self, kept: Any) -> str:
        """All of the text that a stream shows."""
        raise NotImplementedError

    def _certain(self, text: str) -> str:
        """What later tokens cannot change: no half character, nothing that may become a stop string or a tool call."""
        text, marks = text.rstrip(UNFINISHED), list(self.sampling.stop)
        tools = getattr(self.asked, "offered_tools", None)
        if tools:
            marks.append(CALL_OPENS)
        ended = [text.find(mark) for mark in marks if mark in text]
        held = max((_overlap(text, mark) for mark in marks), default=0)
        text = text[: min(ended)] if ended else text[: len(text) - held]
        return text.rstrip() if tools else text

    def _with_facts(self, choice: dict[str, Any], generation: Generation) -> dict[str, Any]:
        if self.asked.return_token_ids:
            choice |= wire.facts(generation)
        return choice

    def _around(self, kind: str, choices: list[dict[str, Any]], generation: Generation | None = None) -> dict[str, Any]:
        answer = wire.envelope(kind, self.id, self.model, choices)
        if generation is not None:
            answer["usage"] = wire.usage(len(self.prompt.ids), len(generation.token_ids))
            if self.asked.return_token_ids:
                answer["prompt_token_ids"] = self.prompt.ids
        return answer

    def _one(self, ids: list[int]) -> str:
        return self.format.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


class ChatAnswer(Answer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def make_prompt(self) -> Prompt:
        tools = self.asked.offered_tools
        messages = [message.plain() for message in self.asked.messages]
        return self.dialogue.chat(messages, tools, lambda given: self.format.render(given, tools), self.format.encode)

    def keep(self, generation: Generation) -> Reply:
        reply = self.format.reply(generation, self.asked.offered_tools)
        self.dialogue.add(self.prompt, generation, message_key(reply.message()))
        return reply

    def choice(self, kept: Reply, generation: Generation) -> dict[str, Any]:
        return {
            "index": 0,
            "message": kept.message(),
            "finish_reason": kept.finish_reason,
            "logprobs": wire.chat_logprobs(generation, self._one) if self.asked.logprobs else None,
        }

    def shown(self, kept: Reply) -> str:
        return kept.content

    def delta(self, text: str, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"index": 0, "delta": {**role, "content": text}, "finish_reason": None}

    def last(self, kept: Reply, generation: Generation) -> dict[str, Any]:
        calls = [{**call, "index": number} for number, call in enumerate(kept.tool_calls)]
        return {
            "index": 0,
            "delta": {"role": "assistant", "tool_calls": calls} if calls else {},
            "finish_reason": kept.finish_reason,
            "logprobs": wire.chat_logprobs(generation, self._one) if self.asked.logprobs else None,
        }


class TextAnswer(Answer):
    kind, chunk_kind = "text_completion", "text_completion"

    def make_prompt(self) -> Prompt:
        prompt = self.asked.prompt
        if not isinstance(prompt, str):
            return self.dialogue.tokens(prompt)
        found = self.dialogue.text(prompt, self.format.encode_first, self.format.encode)
        if not found.ids:
            raise ApiError(400, "prompt: found no tokens")
        return found

    def keep(self, generation: Generation) -> str:
        text = self.format.text(generation)
        self.dialogue.add(self.prompt, generation, text)
        return text

    def choice(self, kept: str, generation: Generation) -> dict[str, Any]:
        return self.last(kept, generation) | {"text": kept}

    def shown(self, kept: str) -> str:
        return kept

    def delta(self, text: str, first: bool) -> dict[str, Any]:
        return {"index": 0, "text": text, "finish_reason": None, "logprobs": None}

    def last(self, kept: str, generation: Generation) -> dict[str, Any]:
        return {
            "index": 0,
            "text": "",
            "finish_reason": "length" if generation.finish_reason == "length" else "stop",
            "logprobs": wire.text_logprobs(generation, self._one) if self.asked.logprobs else None,
        }


def _overlap(text: str, mark: str) -> int:
    """How much of the text's end is the beginning of the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
