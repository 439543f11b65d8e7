"""Turns the requests of one session into token sequences in which sampled tokens are kept as ids, never tokenised again.

Every answered request is a turn. A request that repeats all messages of an earlier turn, its reply included, goes on from
the ids of that turn; only what the client added is tokenised. So turns form a tree, and each path to a leaf is one
*segment*: one sample to train on. A request that repeats nothing (a shortened history, another agent's system message)
begins a segment of its own. Whether a continuation is one is judged on the text that the chat template makes of it, with a
placeholder where each sampled reply stands: the template may then trim or hide old replies as it likes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.rollout.token_rollout import Transcript
from headrace.types import Generation, TokenSample

Render = Callable[[list[dict[str, Any]]], str]
"""Messages into the text of a prompt that asks for the next reply."""
Encode = Callable[[str], list[int]]


@dataclass(slots=True, eq=False)
class Turn:
    """One answered request.

    keys: what the client must repeat to go on from here: one for each message, the reply last; of a text, its one string
    skeleton: the prompt's text, with placeholders for the sampled replies before
    prompt_ids: what this turn added before its reply
    ids: [T] all tokens up to the end of the reply
    """

    parent: Turn | None
    keys: tuple[Hashable, ...]
    skeleton: str
    prompt_ids: list[int]
    generation: Generation
    ids: list[int]
    children: int = 0

    def path(self) -> list[Turn]:
        """From the first turn to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request in tokens. ids: [P] the whole prompt; parent: the turn that it continues."""

    ids: list[int]
    added: list[int]
    parent: Turn | None
    keys: tuple[Hashable, ...]
    skeleton: str = ""


@dataclass(slots=True)
class Dialogue:
    """All turns of a session. `ends`: end token id -> its text, which a template writes after each reply."""

    ends: dict[int, str]
    turns: list[Turn] = field(default_factory=list)
    _nonce: str = field(default_factory=lambda: secrets.token_hex(4))

    # ---------------------------------------------------------------------------------------------- into tokens

    def chat(self, messages: Sequence[dict[str, Any]], tools: Any, render: Render, encode: Encode) -> Prompt:
        keys = (_key({"tools": tools or None}), *map(message_key, messages))
        for parent in self._continued(keys):
            skeleton = render(self._with_placeholders(messages, parent))
            before = parent.skeleton + self._placeholder(len(parent.path()))
            if skeleton.startswith(before):
                added = encode(self._unsampled(skeleton[len(before) :], parent))
                return Prompt([*parent.ids, *added], added, parent, keys, skeleton)
        skeleton = render(list(messages))
        ids = encode(skeleton)
        return Prompt(ids, ids, None, keys, skeleton)

    def text(self, text: str, encode_first: Encode, encode: Encode) -> Prompt:
        for parent in sorted(self.turns, key=lambda turn: -len(turn.ids)):
            (known,) = parent.keys if len(parent.keys) == 1 else (None,)
            if isinstance(known, str) and text.startswith(known):
                added = encode(text[len(known) :])
                return Prompt([*parent.ids, *added], added, parent, (text,))
        ids = encode_first(text)
        return Prompt(ids, ids, None, (text,))

    def tokens(self, ids: list[int]) -> Prompt:
        """A prompt of ids continues the longest turn whose ids it begins with."""
        for parent in sorted(self.turns, key=lambda turn: -len(turn.ids)):
            if ids[: len(parent.ids)] == parent.ids:
                return Prompt(ids, ids[len(parent.ids) :], parent, (tuple(ids),))
        return Prompt(ids, ids, None, (tuple(ids),))

    def _continued(self, keys: tuple[Hashable, ...]) -> list[Turn]:
        """Turns that the keys begin with, the longest first; of equals the latest."""
        found = [turn for turn in self.turns if len(turn.keys) < len(keys) and keys[: len(turn.keys)] == turn.keys]
        return sorted(reversed(found), key=lambda turn: -len(turn.keys))

    def _placeholder(self, number: int) -> str:
        return f"reply{self._nonce}n{number}"

    def _with_placeholders(self, messages: Sequence[dict[str, Any]], parent: Turn) -> list[dict[str, Any]]:
        """The sampled replies replaced: each stands where its turn's keys end (the first key is that of the tools)."""
        replaced = list(messages)
        for number, turn in enumerate(parent.path(), 1):
            replaced[len(turn.keys) - 2] = {"role": "assistant", "content": self._placeholder(number)}
        return replaced

    def _unsampled(self, text: str, parent: Turn) -> str:
        """Without the end token that the template writes, when it was sampled."""
        sampled = parent.generation.token_ids
        return text.removeprefix(self.ends.get(int(sampled[-1]), "")) if len(sampled) else text

    # ----------------------------------------------------------------------------------------------- what came

    def add(self, prompt: Prompt, generation: Generation, reply_key: Hashable) -> Turn:
        """Keep an answered request. reply_key: `message_key` of the reply; of a completion its text, or None for ids."""
        keys: tuple[Hashable, ...] = (*prompt.keys, reply_key)
        if len(prompt.keys) == 1 and isinstance(prompt.keys[0], str):
            keys = (prompt.keys[0] + str(reply_key),)
        turn = Turn(
            parent=prompt.parent,
            keys=keys,
            skeleton=prompt.skeleton,
            prompt_ids=prompt.added,
            generation=generation,
            ids=[*prompt.ids, *generation.token_ids.tolist()],
        )
        if prompt.parent is not None:
            prompt.parent.children += 1
        self.turns.append(turn)
        return turn

    def samples(self, episode_id: str) -> tuple[TokenSample, ...]:
        """One for each segment. A reply that several segments share is trained on in the first, and is prompt in the others."""
        samples, trained = [], set()
        for leaf in (turn for turn in self.turns if not turn.children):
            transcript = Transcript()
            for turn in leaf.path():
                transcript.add_prompt(turn.prompt_ids)
                if id(turn) in trained:
                    transcript.add_prompt(turn.generation.token_ids.tolist())
                else:
                    transcript.add_generation(turn.generation)
                trained.add(id(turn))
            samples.append(transcript.sample(f"{episode_id}.{len(samples)}" if samples else episode_id))
        return tuple(samples)


def message_key(message: dict[str, Any]) -> Hashable:
    """What must be equal for two messages to be the same. Ids of tool calls and the spelling of JSON are not looked at:
    client libraries write both anew."""
    calls = [
        (call.get("function", {}).get("name"), _parsed(call.get("function", {}).get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return _key([message["role"], (message.get("content") or "").strip(), message.get("name"), calls])


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
