"""Turns HTTP requests into calls of the client rollout: OpenAI's API over the live engines, and the life of sessions.

    POST /session                      a place and its task; wait_s is how long to wait for one
    GET  /session/NAME                 how it stands          DELETE: give it up
    POST /session/NAME/score           close it with a reward
    /session/NAME/v1/...               the API below, inside a session; an unknown NAME opens one
    GET  /v1/models                    POST /v1/chat/completions, /v1/completions
    GET  /stats                        POST /pause, /resume, /update

The server's token may do all of it. A session's own key, given out when it is opened, speaks for that session alone, and
as the API key of plain /v1 it names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.errors import HeadraceError, RequestRefused, UserError
from headrace.rollout.clients import wire
from headrace.rollout.clients.answers import ChatAnswer, TextAnswer
from headrace.rollout.clients.chat import ChatFormat
from headrace.rollout.clients.rollout import ClientRollout, Session
from headrace.rollout.clients.wire import ApiError, shape_error

S = TypeVar("S", bound=msgspec.Struct)
BODY_TIMEOUT_S = 30.0
IMPLICIT_WAIT_S = 20.0
"""How long the first request of a session that nobody opened waits for a place."""


class Control(Protocol):
    """What may be done to the engines."""

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def update(self, folder: str) -> int:
        """Make the weights in a folder live; their version."""
        ...

    async def stats(self) -> dict[str, Any]: ...


class ClientApp:
    """The handlers. token: what every request has to bring, unless it brings a session's key."""

    def __init__(
        self, rollout: ClientRollout, format: ChatFormat, control: Control, *, model: str, token: str, max_bytes: int
    ) -> None:
        self.rollout, self.format, self.control = rollout, format, control
        self.model, self.token, self.max_bytes = model, token, max_bytes
        self.base_url = ""
        routes = [
            self._route("GET", "/stats", self.stats),
            self._route("POST", "/pause", self.pause),
            self._route("POST", "/resume", self.resume),
            self._route("POST", "/update", self.update),
            self._route("POST", "/session", self.open_session),
            self._route("GET", "/session/{name}", self.show_session),
            self._route("DELETE", "/session/{name}", self.give_up_session),
            self._route("POST", "/session/{name}/score", self.score_session),
        ]
        for prefix in ("", "/session/{name}"):
            routes += [
                self._route("GET", f"{prefix}/v1/models", self.models),
                self._route("POST", f"{prefix}/v1/chat/completions", self.chat),
                self._route("POST", f"{prefix}/v1/completions", self.completions),
            ]
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})

    # -------------------------------------------------------------------------------------------------- plumbing

    def _route(self, method: str, path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except ApiError as error:
                return _error(error.status, str(error), error.code)
            except (msgspec.MsgspecError, RecursionError, UnicodeError, UserError) as error:
                where = "" if isinstance(error, msgspec.ValidationError | UserError) else "the body is no JSON: "
                return _error(400, where + " ".join(str(error).split()))
            except RequestRefused as error:
                return _error(400, str(error))
            except HeadraceError as error:
                return _error(503, str(error).partition("\n")[0])
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                logging.getLogger(__name__).exception("%s %s", method, path)
                return _error(500, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

        return Route(path, guarded, methods=[method])

    def _bearer(self, request: Request) -> tuple[bool, Session | None]:
        """Whether the server's token was given, and the session whose key was. 401 for neither."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            if hmac.compare_digest(given.encode(), self.token.encode()):
                return True, None
            if (session := self.rollout.by_key(given)) is not None:
                return False, session
        raise ApiError(401, "the Authorization header brings neither the server's token nor a session's key")

    def _owner(self, request: Request) -> None:
        if not self._bearer(request)[0]:
            raise ApiError(403, "a session's key may do this for nobody; the server's token may")

    async def _session(self, request: Request, *, opening: bool) -> Session | None:
        """The session that the path or the key names; None for the server's own plain API."""
        _, session = self._bearer(request)
        name = request.path_params.get("name")
        if name is None:
            return session
        if session is not None and session.name != name:
            raise ApiError(403, f"this key is not that of session {name!r}")
        if session is None and opening:
            return await self.rollout.named(msgspec.convert(name, wire.Name), IMPLICIT_WAIT_S)
        session = session or self.rollout.sessions.get(name) or self.rollout.ended.get(name)
        if session is None:
            raise ApiError(404, f"there is no session {name!r}", "no_session")
        return session

    async def _read(self, request: Request, kind: type[S]) -> S:
        """The body as a struct. 413 beyond the bound, 408 when it does not come."""
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            raise ApiError(413, f"the body has {declared} bytes, at most {self.max_bytes} are read")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.max_bytes:
                        raise ApiError(413, f"the body is longer than {self.max_bytes} bytes")
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
        data = bytes(body) or b"{}"
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            raise ApiError(400, shape_error(error, data)) from None

    # --------------------------------------------------------------------------------------------------- control

    async def stats(self, request: Request) -> Response:
        self._owner(request)
        rollout = self.rollout
        sessions = {"open": len(rollout.sessions), "free_groups": sum(b.began is None for b in rollout.boards.values())}
        return _json({**await self.control.stats(), "sessions": sessions})

    async def pause(self, request: Request) -> Response:
        self._owner(request)
        mode = (await self._read(request, wire.Pause)).mode
        await self.control.pause(mode)
        return _json({"paused": mode})

    async def resume(self, request: Request) -> Response:
        self._owner(request)
        await self.control.resume()
        return _json({"paused": None})

    async def update(self, request: Request) -> Response:
        self._owner(request)
        version = await self.control.update((await self._read(request, wire.Update)).path)
        return _json({"version": version})

    async def models(self, request: Request) -> Response:
        self._bearer(request)
        return _json({"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "headrace"}]})

    # -------------------------------------------------------------------------------------------------- sessions

    async def open_session(self, request: Request) -> Response:
        self._owner(request)
        asked = await self._read(request, wire.OpenSession)
        session = await self._unless_gone(request, self.rollout.open(asked.session, asked.group, asked.wait_s))
        task = {"task_id": session.task.task_id, "source": session.task.source, "payload": session.task.payload}
        where = f"{self.base_url}/session/{session.name}/v1"
        return _json({"session": session.name, "base_url": where, "api_key": session.key, "task": task})

    async def show_session(self, request: Request) -> Response:
        session = await self._session(request, opening=False)
        assert session is not None
        reward = session.score.reward if session.score is not None else None
        return _json({"session": session.name, "ended": session.ended or None, "reward": reward})

    async def give_up_session(self, request: Request) -> Response:
        session = await self._session(request, opening=False)
        assert session is not None
        self.rollout.give_up(session)
        return _json({"session": session.name, "ended": session.ended})

    async def score_session(self, request: Request) -> Response:
        session = await self._session(request, opening=False)
        assert session is not None
        posted = await self._read(request, wire.PostScore)
        posted.check()
        score = await self.rollout.close_session(session, posted)
        return _json({"session": session.name, "reward": score.reward, "error": score.error})

    # ------------------------------------------------------------------------------------------------ generation

    async def chat(self, request: Request) -> Response:
        session = await self._session(request, opening=True)
        return await self._generate(request, session, ChatAnswer, await self._read(request, wire.ChatRequest))

    async def completions(self, request: Request) -> Response:
        session = await self._session(request, opening=True)
        return await self._generate(request, session, TextAnswer, await self._read(request, wire.CompletionRequest))

    async def _generate(self, request: Request, session: Session | None, kind: Any, asked: Any) -> Response:
        asked.check()
        if session is not None:
            self.rollout.alive(session)
        answer = kind(self.rollout, self.format, session, asked, asked.model or self.model)
        if asked.stream:
            # The first piece decides between an error with its status and a stream that has begun.
            pieces = answer.stream()
            first = await self._unless_gone(request, anext(pieces))
            return StreamingResponse(_events(first, pieces), media_type="text/event-stream")
        return _json(await self._unless_gone(request, answer.whole()))

    async def _unless_gone(self, request: Request, work: Any) -> Any:
        """The result, unless the client closes its connection first: then the work is cancelled."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(first: dict[str, Any], pieces: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(pieces):  # type: ignore[type-var]
        yield _event(first)
        try:
            async for piece in pieces:
                yield _event(piece)
        except (ApiError, HeadraceError) as error:  # the status is sent already
            yield _event(_problem(str(error).partition("\n")[0], "stream_failed"))
            return
        yield b"data: [DONE]\n\n"


def _event(piece: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(piece) + b"\n\n"


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _problem(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "headrace_error", "code": code or None}}


def _error(status: int, message: str, code: str = "") -> Response:
    response = _json(_problem(message, code), status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if status == 503:
        response.headers["retry-after"] = "1"
    return response


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _error(status, "no such address" if status == 404 else "this method is not allowed here")
