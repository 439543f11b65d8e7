"""What clients send and get, as validated structs: OpenAI's fields, and token ids, log-probabilities and versions beside them."""

from __future__ import annotations

import re
import reprlib
import time
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.types import Generation, SamplingParams

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[\w.:@=+-]+$")]
MAX_STOPS = 16


class ApiError(Exception):
    """An answer that is not 200: status, and one line for the client."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


def shape_error(error: msgspec.ValidationError, body: bytes) -> str:
    """One line for a body of the wrong shape, with the value found: msgspec says where it stands and what was expected."""
    text = " ".join(str(error).split())
    place = re.search(r" - at `(?:key in )?\$([^`]*)`$", text)
    value = msgspec.json.decode(body)
    try:
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", place[1] if place else ""):
            value = value[name or int(index)]
    except (LookupError, TypeError):  # a key that comes twice: the place is in the first, the value the last's
        return text
    return text if "missing" in text else f"{text}; found {reprlib.repr(value)}"


class Part(msgspec.Struct):
    type: str
    text: str = ""


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """A dict with text content, as templates read it."""
        content = self.content
        if isinstance(content, list):
            if odd := next((part.type for part in content if part.type != "text"), None):
                raise ApiError(400, f"messages: found a part of type {odd!r}; only text is understood")
            content = "".join(part.text for part in content)
        rest = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": content or "", **{key: value for key, value in rest.items() if value}}


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that chat and completions share. Unknown ones are ignored, those that ask for something else are refused."""

    model: str = ""
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    n: int | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    logprobs: bool | int | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-1e6, le=1e6)]] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def params(self, run: SamplingParams, *, trained: bool) -> SamplingParams:
        """The request's sampling over the run's. Of a session, whose tokens are trained on, only the length and stops are
        the client's: the trainer has to know the distribution that tokens came from, and has the run's."""
        if self.n not in (None, 1):
            raise ApiError(400, f"n: found {self.n}; ask several times instead")
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise ApiError(400, f"{name}: found {getattr(self, name)}, which is not supported")
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given = {name: max(value, 0) for name, value in given.items() if value is not None}
        if self.logit_bias:
            given["logit_bias"] = tuple((_token(key), bias) for key, bias in self.logit_bias.items())
        if trained:
            for name, value in given.items():
                if value != getattr(run, name):
                    raise ApiError(
                        400,
                        f"{name}: found {value} in a session whose tokens are trained on with {getattr(run, name)}; "
                        f"leave it out, or set rollout.sampling.{name}",
                    )
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(not stop for stop in stops):
            raise ApiError(400, "stop: found an empty text")
        asked = self.max_completion_tokens or self.max_tokens or run.max_tokens
        length = min(asked, run.max_tokens) if trained else asked
        given |= {"max_tokens": length, "min_tokens": min(run.min_tokens, length)}
        return replace(run, **given, stop=tuple(dict.fromkeys((*run.stop, *stops))), seed=self.seed)


class ChatRequest(Sampling, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None

    def check(self) -> None:
        if self.tool_choice not in (None, "auto", "none"):
            raise ApiError(400, f"tool_choice: found {self.tool_choice!s:.60}; auto and none are understood")
        if (self.response_format or {}).get("type", "text") != "text":
            raise ApiError(400, "response_format: only text is supported")

    @property
    def offered_tools(self) -> Any:
        return None if self.tool_choice == "none" else self.tools


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]], Meta(min_length=1)]
    echo: bool | None = None

    def check(self) -> None:
        if self.echo:
            raise ApiError(400, "echo: found true, which is not supported; see return_token_ids")


class OpenSession(msgspec.Struct, forbid_unknown_fields=True):
    """session: the client's own name for it; group: sessions of one group are compared with each other."""

    session: Name | None = None
    group: Name | None = None
    wait_s: Annotated[float, Meta(ge=0, le=300)] = 20.0


MOST_REWARD = 1e15
"""Credit is kept in float32 and made of squares."""


class PostScore(msgspec.Struct, forbid_unknown_fields=True):
    """reward None: the run's reward functions score the session's last answer."""

    reward: float | None = None
    parts: dict[str, float] = {}

    def check(self) -> None:
        for name, value in {"reward": self.reward, **self.parts}.items():
            if value is not None and not abs(value) <= MOST_REWARD:
                raise ApiError(400, f"{name}: found {value}, expected a number of at most {MOST_REWARD:g}")


class Pause(msgspec.Struct, forbid_unknown_fields=True):
    """keep: freeze what runs; wait: until it has ended; abort: hand it back to be continued after resume."""

    mode: Literal["keep", "wait", "abort"] = "keep"


class Update(msgspec.Struct, forbid_unknown_fields=True):
    """path: a folder of weights on the server's machine, as checkpoints hold them."""

    path: Annotated[str, Meta(max_length=1000)]


def _token(key: str) -> int:
    if not key.isdecimal():
        raise ApiError(400, f"logit_bias: found the key {key[:20]!r}, expected a token id")
    return int(key)


# ---------------------------------------------------------------------------------------------------------- answers


def facts(generation: Generation) -> dict[str, Any]:
    """[T] each: the sampled ids and the versions of the weights that sampled them."""
    return {
        "token_ids": generation.token_ids.tolist(),
        "policy_versions": generation.policy_versions.tolist(),
    }


def chat_logprobs(generation: Generation, decode: Any) -> dict[str, Any]:
    rows = zip(generation.token_ids.tolist(), generation.logprobs.tolist(), strict=True)
    content = []
    for token_id, logprob in rows:
        text = decode([token_id])
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def text_logprobs(generation: Generation, decode: Any) -> dict[str, Any]:
    return {
        "tokens": [decode([token_id]) for token_id in generation.token_ids.tolist()],
        "token_logprobs": generation.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": None,
    }


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def envelope(kind: str, request_id: str, model: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model, "choices": choices}
