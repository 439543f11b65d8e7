"""A server over an engine that says what a test tells it to, token by token, for tests of what clients get and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import numpy as np
from openai import AsyncOpenAI

from headrace.errors import RequestRefused
from headrace.protocols import Lease
from headrace.rollout.clients.app import ClientApp
from headrace.rollout.clients.chat import ChatFormat
from headrace.rollout.clients.rollout import ClientRollout
from headrace.rollout.clients.server import Server
from headrace.rollout.config import ClientsConfig, GroupConfig, TasksConfig
from headrace.rollout.environments.single_turn import SingleTurn
from headrace.rollout.partial import PARTIAL_POLICIES
from headrace.types import GenerateRequest, Generation, SamplingParams, Task
from rollout.test_single_turn import make_tokenizer

TOKEN = "a token for tests"
TEMPLATE = (
    "{{ '<bos>' }}{% if tools %}<turn>tools:{{ tools | tojson }}<end_of_turn>{% endif %}"
    "{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
END = "<end_of_turn>"
Say = Callable[[str, int], str | None]
"""(the prompt's text, number of the request) -> what the model says; None: nothing, until it is cancelled."""


class Speaker:
    """A text engine without a model. version: stamped on every token; prompts: [ids] of each request."""

    def __init__(self, tokenizer: Any, say: Say) -> None:
        self.tokenizer, self.say, self.version = tokenizer, say, 3
        self.prompts: list[list[int]] = []
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self.token_s = 0.0

    async def generate(self, request: GenerateRequest, report: Any = None) -> Generation:
        self.requests.append(request)
        self.prompts.append(request.prompt_ids.tolist())
        if len(request.prompt_ids) > 2000:
            raise RequestRefused("prompt of more than 2000 tokens: shorten it")
        text = self.say(self.tokenizer.decode(request.prompt_ids, skip_special_tokens=False), len(self.prompts) - 1)
        try:
            if text is None:
                await asyncio.Event().wait()
            return await self._speak(request, text or "", report)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _speak(self, request: GenerateRequest, text: str, report: Any) -> Generation:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.convert_tokens_to_ids(END)
        ids = [*ids, end][: request.sampling.max_tokens]
        stopped, stop = ids[-1] == end, end
        for number in range(1, len(ids) + 1):
            said = self.tokenizer.decode(ids[:number])
            if found := [s for s in request.sampling.stop if said.endswith(s)]:
                ids, stopped, stop = ids[:number], True, found[0]
                break
            if report is not None:
                await asyncio.sleep(self.token_s)
                report(self._generation(request, ids[number - 1 : number], "abort", None))
        return self._generation(request, ids, "stop" if stopped else "length", stop if stopped else None)

    def _generation(self, request: GenerateRequest, ids: list[int], reason: Any, stop: Any) -> Generation:
        return Generation(
            token_ids=np.array(ids, np.int64),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 10,
            policy_versions=np.full(len(ids), self.version),
            finish_reason=reason,
            sampling=request.sampling,
            matched_stop=stop,
        )


class Steering:
    """A control that notes what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def pause(self, mode: str) -> None:
        self.told.append(("pause", mode))

    async def resume(self) -> None:
        self.told.append("resume")

    async def update(self, folder: str) -> int:
        self.told.append(("update", folder))
        return 7

    async def stats(self) -> dict[str, Any]:
        return {"version": 3}


class Stand:
    """The server, its rollout, and clients of it."""

    def __init__(
        self, say: Say, *, rewarder: Any = None, idle_s: float = 60.0, size: int = 2, retries: int = 0
    ) -> None:
        tokenizer = make_tokenizer(template=TEMPLATE)
        end = tokenizer.convert_tokens_to_ids(END)
        environment = SingleTurn(tokenizer, TasksConfig(), end_token_ids=[end])
        self.tokenizer, self.engine = tokenizer, Speaker(tokenizer, say)
        self.format, self.steering = ChatFormat(environment), Steering()
        self.rollout = ClientRollout(
            self.engine,
            lambda: environment,
            rewarder,
            sampling=SamplingParams(max_tokens=200),
            group=GroupConfig(size=size, min_complete=size, retries=retries, timeout_s=30.0),
            partial=PARTIAL_POLICIES["continue"],
            open_time=asyncio.get_running_loop().time,
            idle_s=idle_s,
            ends=self.format.ends,
        )
        self.app = ClientApp(self.rollout, self.format, self.steering, model="speaker", token=TOKEN, max_bytes=100_000)
        self.server = Server(self.app.asgi, ClientsConfig())
        self.url = self.app.base_url = self.server.url
        self.http = httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=10)
        self.leases: list[asyncio.Task[Any]] = []
        self._openai: list[AsyncOpenAI] = []

    def lease(self, payload: dict[str, Any] | None = None) -> asyncio.Task[Any]:
        """One lease in the hands of the rollout, as the controller would give it."""
        number = len(self.leases)
        task = Task(task_id=f"t{number}", source="s", payload=payload or {"n": number})
        self.leases.append(asyncio.create_task(self.rollout(Lease(lease_id=f"0-{number}", index=number, task=task))))
        return self.leases[-1]

    async def session(self, **asked: Any) -> dict[str, Any]:
        answer = await self.http.post("/session", json=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def openai(self, where: dict[str, Any] | None = None, key: str = "") -> AsyncOpenAI:
        """In a session by its path and key, or with the server's token."""
        base = where["base_url"] if where else f"{self.url}/v1"
        client = AsyncOpenAI(base_url=base, api_key=key or (where["api_key"] if where else TOKEN), max_retries=0)
        self._openai.append(client)
        return client

    async def score(self, session: dict[str, Any], **posted: Any) -> httpx.Response:
        return await self.http.post(f"/session/{session['session']}/score", json=posted)

    async def close(self) -> None:
        for lease in self.leases:
            lease.cancel()
        await asyncio.gather(*self.leases, return_exceptions=True)
        await self.http.aclose()
        for client in self._openai:
            await client.close()
        await self.server.close()
