"""A config whose episodes come from clients into the parts that this adds to a run: the rollout, and the HTTP server before it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from headrace.config import RunConfig
from headrace.errors import MissingExtra, PartFailed
from headrace.models.catalog import check_folder
from headrace.orchestrator.controller import Controller
from headrace.orchestrator.parts import Parts
from headrace.rollout.clients.chat import ChatFormat
from headrace.rollout.clients.rollout import ClientRollout
from headrace.rollout.clients.server import Server, choose_token, write_note
from headrace.rollout.clients.wire import ApiError

NOTE = "clients.json"


def client_rollout(config: RunConfig, environment: Any) -> Callable[..., ClientRollout]:
    return partial(ClientRollout, idle_s=config.clients.idle_s, ends=ChatFormat(environment).ends)


async def serve_clients(
    stack: AsyncExitStack,
    config: RunConfig,
    run_dir: Path,
    controller: Controller,
    parts: Parts,
    token: str,
    say: Callable[[str], None],
) -> None:
    """Open the server; it closes with the stack."""
    try:
        from headrace.rollout.clients.app import ClientApp
    except ImportError:
        raise MissingExtra("starlette", "serve", 'rollout.source = "http"') from None
    note = run_dir / NOTE
    token = choose_token(token, config.clients.host, note)
    app = ClientApp(
        parts.rollout,
        ChatFormat(parts.rollout.environment()),
        EngineControl(controller, parts.backend),
        model=config.model.path,
        token=token,
        max_bytes=int(config.clients.max_body_mb * 1e6),
    )
    server = Server(app.asgi, config.clients)
    stack.push_async_callback(server.close)
    app.base_url = server.url
    write_note(note, server.url, token)
    say(f"clients: {server.url}/v1, the token is in {note}")


class EngineControl:
    """What the API may do to a run's engines. Weights may come from a folder only while no trainer makes them."""

    def __init__(self, controller: Controller, backend: Any) -> None:
        self.controller, self.backend = controller, backend

    async def pause(self, mode: str) -> None:
        for slot in self.controller.dispatcher.live():
            await slot.proxy.pause(mode)

    async def resume(self) -> None:
        for slot in self.controller.dispatcher.live():
            await slot.proxy.resume()

    async def update(self, folder: str) -> int:
        if self.controller.learner.updates_weights:
            raise ApiError(
                409, "the weights are the trainer's: an update from outside goes with `headrace serve` alone"
            )
        try:
            check_folder(Path(folder))
        except OSError as error:  # a name that no file system takes
            raise ApiError(400, f"path: {error}") from None
        try:
            await self.backend.load(folder, weights_only=True)
        except PartFailed as error:
            line = str(error).partition("\n")[0]
            raise ApiError(400, f"{folder} could not be loaded: {line}") from None
        return await self.controller.publish_anew()

    async def stats(self) -> dict[str, Any]:
        engines = []
        for slot in self.controller.dispatcher.live():
            stats = await slot.proxy.stats()
            engines.append(
                {
                    "name": slot.name,
                    "version": stats.version,
                    "running": stats.running,
                    "waiting": stats.waiting,
                    "paused": stats.paused,
                    "generated_tokens": stats.generated_tokens,
                }
            )
        ledger = self.controller.ledger
        counts = {
            "submitted": ledger.submitted,
            "trained": ledger.trained,
            "dropped": dict(ledger.dropped),
            "in_flight": len(ledger.in_flight),
        }
        return {"version": self.controller.weight_sync.live_version, "engines": engines, "groups": counts}
