"""Actors elsewhere, seen from the learner: what they bring, what they lose, and what strangers send in their place."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import msgspec
import numpy as np
import pytest

from headrace.errors import ConfigError, HeadraceError, PartFailed, RunError, StaleTicket, UserError
from headrace.exchange.channels.http import HttpChannel
from headrace.exchange.stores.redis_stream import RedisSender, connect
from headrace.orchestrator.remote import board as boards
from headrace.orchestrator.remote.actor import _refuse_imports, run_actor
from headrace.orchestrator.remote.board import Board, word_of
from headrace.orchestrator.remote.pool import ActorPool, PoolPlan, end_board
from headrace.orchestrator.remote.trust import flaw
from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import ActionSpec, Leaf, Spaces
from headrace.protocols import Resources, TrajectoryRequest, WorkerContext
from headrace.rollout.config import EnvConfig
from headrace.types import Event, RequestKey, Trajectory, WeightTicket
from rollout.control_helpers import actor, collect

ENV = EnvConfig(id="CartPole-v1", count=2, steps=4)


def ticket(version: int) -> WeightTicket:
    return WeightTicket(policy="main", version=version, scope="full", locator="http://x", checksum="", bytes=1)


class Elsewhere:
    """An actor as its learner sees it: it takes requests and answers them, as long as it wants to."""

    def __init__(self, url: str, name: str, run: str = "r") -> None:
        self.board, self.name = Board(url, run), name
        self.sender, self.busy_s = RedisSender(url, self.board.stream), 0.0
        self.here()

    def here(self) -> None:
        self.busy_s += 0.1
        self.board.here(self.name, word_of(8, self.busy_s, 0))

    def take(self) -> str:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            self.here()
            if (name := self.board.take(self.name, 0.2)) is not None:
                return name
        raise AssertionError("nothing was wanted")

    def send(self, name: str, unit: Trajectory) -> None:
        self.sender.send(name, unit)
        self.board.done(self.name, name)


def request(lease: str) -> TrajectoryRequest:
    return TrajectoryRequest(key=RequestKey(lease_id=lease))


@pytest.fixture
async def unit() -> Trajectory:
    made = (await collect(actor("CartPole-v1", steps=4)))[0]
    return dataclasses.replace(made, policy_versions=np.zeros_like(made.policy_versions))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
async def open_pool(own_redis, said, events, monkeypatch):
    """Pools on a private server; an actor is taken for dead after a second."""
    monkeypatch.setattr(boards, "GONE_S", 1)
    opened: list[ActorPool] = []

    async def open_(run: str = "r", resumed: bool = False, session: str = "") -> ActorPool:
        plan = PoolPlan(
            session=session or f"session-{len(opened)}", url=own_redis.url, run=run, env=ENV, policy=PolicyConfig(), seed=0, step_timeout_s=60.0, wait_s=5.0,
            resumed=resumed,
        )  # fmt: skip
        context = WorkerContext(name="engine-0", record=events.append, resources=Resources())
        opened.append(ActorPool(context, plan, HttpChannel(), said.append))
        await opened[-1].commit(ticket(0))
        return opened[-1]

    yield open_
    for pool in opened:
        if not pool._closing:
            await pool.close()


async def described(pool: ActorPool, elsewhere: Elsewhere) -> None:
    elsewhere.board.show_spaces(actor("CartPole-v1", steps=4).engine.spaces)
    await pool.describe()


async def test_a_request_goes_out_and_its_trajectory_comes_back_under_the_leases_name(
    open_pool, own_redis, unit, events
):
    pool, elsewhere = await open_pool(), Elsewhere(own_redis.url, "a")
    await described(pool, elsewhere)
    asked = asyncio.create_task(pool.generate(request("0-7")))
    name = await asyncio.to_thread(elsewhere.take)
    assert name == request("0-7").request_id
    elsewhere.send(name, unit)
    found = await asyncio.wait_for(asked, 5)
    assert found.sample_id == "0-7" and found.observations["obs"].tobytes() == unit.observations["obs"].tobytes()
    stats = await pool.stats()
    assert stats.version == 0 and stats.progress == {} and stats.generated_tokens >= 8 and not stats.paused
    elsewhere.here()
    await until(lambda: events)
    assert (events[0].source, events[0].kind) == ("engine-a", "generate") and events[0].duration_ns >= 1e8
    elsewhere.send(name, unit)  # a second answer
    await until(lambda: pool.ignored == 1)
    with pytest.raises(StaleTicket):
        await pool.commit(ticket(-1))
    await pool.close()
    assert elsewhere.board.notice() is not None, "another pool may take this one's place"
    end_board(pool.plan)
    assert connect(own_redis.url).keys() == [b"headrace:actors:r:over"], "nothing is left but that the run is over"


async def until(what, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.02)


async def test_what_a_dead_actor_held_is_wanted_again_and_its_late_answer_is_ignored(open_pool, own_redis, unit, said):
    pool, dead = await open_pool(), Elsewhere(own_redis.url, "dead")
    await described(pool, dead)
    asked = asyncio.create_task(pool.generate(request("0-0")))
    name = await asyncio.to_thread(dead.take)
    await until(lambda: "actor dead" in " ".join(said))
    await until(lambda: any("dead" in text and "is gone; none is left" in text for text in said))
    assert (await pool.stats()).paused, "with nobody there, nobody is to blame for standing still"
    other = Elsewhere(own_redis.url, "other")
    assert await asyncio.to_thread(other.take) == name
    other.send(name, unit)
    await asyncio.wait_for(asked, 5)
    dead.send(name, unit)  # it was only stopped
    await until(lambda: pool.ignored == 1)


async def test_a_server_that_lost_everything_is_told_everything_again(open_pool, own_redis, unit, said):
    pool, elsewhere = await open_pool(), Elsewhere(own_redis.url, "a")
    await described(pool, elsewhere)
    asked = asyncio.create_task(pool.generate(request("0-0")))
    await until(lambda: elsewhere.board.wanted())
    own_redis.stop()
    await until(lambda: any("is away" in text for text in said))
    own_redis.durable = False
    (own_redis.folder / "empty").mkdir()
    own_redis.folder = own_redis.folder / "empty"
    own_redis.start()
    name = await asyncio.to_thread(elsewhere.take)
    assert elsewhere.board.notice() is not None and elsewhere.board.ticket().ticket.version == 0
    assert elsewhere.board.spaces() is not None
    elsewhere.send(name, unit)
    await asyncio.wait_for(asked, 5)
    assert "the Redis server is back" in said


async def test_strangers_and_liars_are_counted_and_the_request_stays_wanted(open_pool, own_redis, unit, said):
    pool, elsewhere = await open_pool(), Elsewhere(own_redis.url, "a")
    await described(pool, elsewhere)
    asked = asyncio.create_task(pool.generate(request("0-0")))
    name = await asyncio.to_thread(elsewhere.take)
    client = connect(own_redis.url)
    client.xadd(elsewhere.board.stream, {"key": name, "nonce": "n", "unit": b"\x93garbage"})
    await until(lambda: pool.refused == 1)
    elsewhere.send(name, dataclasses.replace(unit, rewards=unit.rewards * np.nan))
    await until(lambda: pool.refused == 2)
    assert not asked.done()
    elsewhere.send("0-99/0.0#0@0", unit)
    await until(lambda: pool.ignored == 1)
    client.sadd("headrace:actors:r:actors", "mad")
    client.set("headrace:actors:r:actor:mad", b"\x00")
    client.lpush("headrace:actors:r:held:mad", name)
    assert await asyncio.to_thread(elsewhere.take) == name, "it was not answered, so it is wanted again"
    elsewhere.send(name, unit)
    await asyncio.wait_for(asked, 5)
    assert any("rewards is not finite" in text for text in said) and any("no unit at all" in text for text in said)
    await until(lambda: not client.xlen(elsewhere.board.stream))


async def test_a_learner_that_comes_back_uses_what_came_meanwhile(open_pool, own_redis, unit):
    first, elsewhere = await open_pool(), Elsewhere(own_redis.url, "a")
    await described(first, elsewhere)
    asked = asyncio.create_task(first.generate(request("0-3")))
    name = await asyncio.to_thread(elsewhere.take)
    first._closing = True  # it is killed: threads end, nobody says good-bye
    for thread in first._threads:
        await asyncio.to_thread(thread.join)
    asked.cancel()
    elsewhere.send(name, unit)
    second = await open_pool(resumed=True)
    await second.describe()
    found = await asyncio.wait_for(second.generate(request("1-3")), 5)
    assert found.sample_id == "1-3" and found.rewards.tobytes() == unit.rewards.tobytes()
    assert elsewhere.board.wanted() == []


async def test_two_learners_of_one_name_are_not_let_on_one_board(open_pool):
    await open_pool("taken")
    with pytest.raises(ConfigError, match='name: found "taken", under which another run has actors'):
        await open_pool("taken")
    await open_pool("taken:too")


async def test_a_pool_that_is_given_up_is_replaced_and_its_actors_stay(open_pool, own_redis, unit):
    first, elsewhere = await open_pool(session="one"), Elsewhere(own_redis.url, "a")
    await described(first, elsewhere)
    started = time.monotonic()
    second = await open_pool(session="one", resumed=True)
    assert time.monotonic() - started < 1.0 and await second.describe() == first._spaces
    await first.close()
    asked = asyncio.create_task(second.generate(request("0-1")))
    elsewhere.send(await asyncio.to_thread(elsewhere.take), unit)
    assert (await asyncio.wait_for(asked, 5)).sample_id == "0-1" and not elsewhere.board.over()


async def test_a_server_that_answers_nonsense_is_said_and_recovered_from(open_pool, own_redis, unit, said):
    pool, elsewhere = await open_pool(), Elsewhere(own_redis.url, "a")
    await described(pool, elsewhere)
    client = connect(own_redis.url)
    client.set("headrace:actors:r:wanted", "no list")
    asked = asyncio.create_task(pool.generate(request("0-0")))
    await until(lambda: any("WRONGTYPE" in text for text in said))
    client.delete("headrace:actors:r:wanted")
    name = await asyncio.to_thread(elsewhere.take)
    elsewhere.send(name, unit)
    await asyncio.wait_for(asked, 5)
    pool._tidy = None  # a thread that breaks is no silence
    await until(lambda: pool._broken)
    with pytest.raises(PartFailed, match="actors-board"):
        await pool.stats()


def spaces_of(dtype: str) -> bytes:
    leaf = Leaf("obs", "vector", (4,), dtype)
    return msgspec.msgpack.encode(Spaces((leaf,), ActionSpec("discrete", (), (2,), (0,))))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda client: client.set("headrace:actors:r:run", b"{}"), "is not what it should be"),
        (lambda client: client.set("headrace:actors:r:ticket", b"[1, 2]"), "is not what it should be"),
        (lambda client: client.rpush("headrace:actors:r:ticket", "x"), "WRONGTYPE"),
        (lambda client: client.set("headrace:actors:r:spaces", b"\xc1"), "does not describe environments"),
        (lambda client: client.set("headrace:actors:r:spaces", spaces_of("object")), "obs is object"),
    ],
)
async def test_an_actor_ends_with_one_line_when_the_server_says_what_cannot_be(own_redis, spoil, words):
    board, client = Board(own_redis.url, "r"), connect(own_redis.url)
    notice = boards.RunNotice(
        session="s", seed=0, env={"id": "CartPole-v1", "count": 2, "steps": 4}, policy={}, channel="http",
        settings={"address": "127.0.0.1:0", "token": "t"}, step_timeout_s=60.0,
    )  # fmt: skip
    board.announce(notice, None)
    spoil(client)
    with pytest.raises(HeadraceError, match=words) as caught:
        await asyncio.to_thread(run_actor, own_redis.url, "", [], 2.0, lambda text: None)
    assert "\n" not in str(caught.value)


def test_an_address_is_shown_without_its_password():
    with pytest.raises(UserError, match=r"not the address of a Redis server") as caught:
        run_actor("http://user:secret@here", "", [], 1.0, print)
    with pytest.raises(RunError, match=r"no Redis server answers at redis://user:\*\*\*@127") as away:
        run_actor("redis://user:secret@127.0.0.1:1/0", "", [], 0.1, print)
    assert "secret" not in str(caught.value) + str(away.value)


async def test_an_aborted_request_is_taken_off_the_board(open_pool, own_redis):
    pool, elsewhere = await open_pool(), Elsewhere(own_redis.url, "a")
    await described(pool, elsewhere)
    asked = asyncio.create_task(pool.generate(request("0-0")))
    await until(lambda: elsewhere.board.wanted())
    await pool.abort(request("0-0").request_id)
    with pytest.raises(PartFailed, match="aborted"):
        await asked
    await until(lambda: not elsewhere.board.wanted())


LIES = {
    "rewards is float32": lambda unit: {"rewards": unit.rewards[:-1]},
    "rewards is int64": lambda unit: {"rewards": np.zeros((4, 2), np.int64)},
    "behavior_logprobs is not finite": lambda unit: {"behavior_logprobs": unit.behavior_logprobs - np.inf},
    "actions is float64": lambda unit: {"actions": unit.actions.astype(float)},
    "actions are not below": lambda unit: {"actions": unit.actions + 2},
    "observations are": lambda unit: {"observations": {"other": unit.observations["obs"]}},
    "observations.obs is float32": lambda unit: {"observations": {"obs": unit.observations["obs"][:, :, :3]}},
    "policy_versions go from 9": lambda unit: {"policy_versions": unit.policy_versions + 9},
    "policy_versions go from -1": lambda unit: {"policy_versions": unit.policy_versions - 1},
    "terminated and truncated": lambda unit: {
        "terminated": np.ones_like(unit.terminated), "truncated": np.ones_like(unit.truncated)
    },
    "final_observations are": lambda unit: {"ended": np.array([[0, 0]])},
    "ended names steps": lambda unit: {
        "ended": np.array([[4, 0]]), "final_observations": {"obs": unit.observations["obs"][0, :1]}
    },
    "ended is int64 []": lambda unit: {"ended": np.int64(3).reshape(())},
    "ended is float64": lambda unit: {"ended": np.zeros((1, 2))},
    "do not fit each other": lambda unit: {"episode_returns": np.ones(3, np.float32), "episode_lengths": np.ones(2, np.int64)},
    "initial_state has ['h'], expected []": lambda unit: {"initial_state": {"h": np.zeros((2, 0), np.float32)}},
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_trajectory_that_is_not_what_it_says_is_told_apart(unit, lie):
    spaces = actor("CartPole-v1", steps=4).engine.spaces
    assert flaw(unit, spaces, 4, 2, newest=3) == ""
    assert lie in flaw(dataclasses.replace(unit, **LIES[lie](unit)), spaces, 4, 2, newest=3)


@pytest.mark.parametrize("recurrent", ["gru", "lstm"])
async def test_a_memory_is_part_of_what_is_checked(open_pool, recurrent):
    policy = PolicyConfig(recurrent=recurrent, recurrent_size=6)
    made = actor("CartPole-v1", steps=4, policy=policy)
    unit = (await collect(made))[0]
    unit = dataclasses.replace(unit, policy_versions=np.zeros_like(unit.policy_versions))
    pool = await open_pool()
    pool.plan = msgspec.structs.replace(pool.plan, policy=policy)
    pool._spaces = made.engine.spaces
    assert pool._flaw(unit) == ""
    assert "initial_state has" in pool._flaw(dataclasses.replace(unit, initial_state=None))
    short = {name: state[:, :5] for name, state in unit.initial_state.items()}
    assert "initial_state.h is float32 [2, 5]" in pool._flaw(dataclasses.replace(unit, initial_state=short))


@pytest.mark.parametrize("name", ["file.py:make", "os:system", "pkg:Env-v0"])
def test_what_a_server_names_is_imported_only_when_the_command_line_says_so(name):
    with pytest.raises(ConfigError, match="--allow"):
        _refuse_imports({"env.id": name, "policy.network": ""}, [])
    _refuse_imports({"env.id": name, "policy.network": ""}, [name])
    _refuse_imports({"env.id": "sim:CartPole-v1", "policy.network": ""}, [])
