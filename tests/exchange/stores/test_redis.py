"""The Redis store against a real server: restarts, lost replies, duplicates, garbage, a full server, actors elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from exchange.units import group
from headrace.errors import CallTimeout, PartFailed, UnitLost
from headrace.exchange.stores.redis import RedisStore
from headrace.exchange.stores.redis_stream import RedisSender, connect
from redis_server import RedisServer, free_port

STREAM = "headrace:test"


@pytest.fixture
def store(own_redis: RedisServer) -> Iterator[RedisStore]:
    opened = RedisStore(own_redis.url, STREAM, retry_s=10.0, accept=True)
    yield opened
    opened.close()


def put(store: RedisStore, *names: str) -> None:
    for name in names:
        store.append(name, group(name))


def test_a_restart_in_the_middle_loses_nothing_and_nobody_waits_at_put(store, own_redis):
    put(store, "a", "b")
    assert store.flush(5.0) and store.read("a").group_id == "a"
    own_redis.stop()
    started = time.monotonic()
    put(store, "c", "d")
    assert time.monotonic() - started < 0.2, "put never waits"
    assert store.read("c").group_id == "c", "what the server has not got yet is read here"
    threading.Timer(0.7, own_redis.start).start()
    assert store.read("b").group_id == "b", "read waits for the server"
    assert store.flush(10.0)
    assert [store.read(name).group_id for name in "abcd"] == list("abcd")
    assert connect(own_redis.url).xlen(STREAM) == 4


def test_a_server_that_forgot_everything_costs_what_it_had(own_redis):
    own_redis.stop()
    own_redis.durable = False
    (own_redis.folder / "empty").mkdir()
    own_redis.folder = own_redis.folder / "empty"
    own_redis.start()
    store = RedisStore(own_redis.url, STREAM, retry_s=5.0)
    put(store, "a", "b")
    assert store.flush(5.0) and store.read("b").group_id == "b"
    own_redis.restart()
    put(store, "c")
    assert store.read("c").group_id == "c" and store.flush(5.0) and store.read("c").group_id == "c"
    for name in ("a", "b"):
        if name == "a":  # it had come along with b, unread
            assert store.read(name).group_id == "a"
        with pytest.raises(UnitLost, match="appendonly"):
            store.read(name)
    store.close()


def test_a_unit_that_came_twice_is_kept_once(store, own_redis):
    sender, client = RedisSender(own_redis.url, STREAM), connect(own_redis.url)
    sender.send("x", group("x"))
    sender.send("x", group("x"))  # its first reply was lost
    put(store, "y")
    assert store.flush(5.0)
    (_, fields) = client.xrevrange(STREAM, count=1)[0]
    client.xadd(STREAM, fields)  # as a writer does that lost the reply
    assert store.arrivals() == ["x"] and store.duplicates == 2
    assert store.read("y").group_id == "y" and sorted(store.scan()) == ["x", "y"]
    assert store.flush(5.0) and client.xlen(STREAM) == 2
    sender.close()


def test_the_next_incarnation_takes_over_what_was_read_and_what_was_not(own_redis):
    first = RedisStore(own_redis.url, STREAM)
    put(first, "a", "b", "c")
    first.flush(5.0)
    first.read("a")
    with pytest.raises(PartFailed, match="another run uses the stream headrace:test at redis://"):
        RedisStore(own_redis.url, STREAM)
    first._client.close()  # it is killed: no goodbye
    second = RedisStore(own_redis.url, STREAM)
    assert sorted(second.scan()) == ["a", "b", "c"]
    assert [second.read(name).group_id for name in "cab"] == ["c", "a", "b"]
    for name in "abc":
        second.acknowledge(name)
    second.forget(second.acknowledged())
    second.close()
    assert not connect(own_redis.url).exists(STREAM), "an empty stream is removed"
    first._writer.close(0.0)


@pytest.mark.parametrize(
    "fields", [{"x": "y"}, {"key": "g"}, {"key": b"\xff", "unit": b"G\x00"}, {"unit": b"T" + b"\x81" * 50}]
)
def test_garbage_in_the_stream_is_a_lost_unit_and_nothing_else(store, own_redis, fields):
    client = connect(own_redis.url)
    client.xadd(STREAM, fields)
    put(store, "a")
    (key,) = store.arrivals()
    with pytest.raises(UnitLost):
        store.read(key)
    assert store.read("a").group_id == "a"
    store.acknowledge(key)
    store.forget([key])
    assert store.flush(5.0) and client.xlen(STREAM) == 1


def test_what_others_add_to_a_stream_that_is_not_theirs_is_removed_and_counted(own_redis):
    """Law 1 counts what the store has: an entry that no lease stands for must not be among it."""
    store, client = RedisStore(own_redis.url, STREAM), connect(own_redis.url)
    sender = RedisSender(own_redis.url, STREAM)
    sender.send("stranger", group("stranger"))
    client.xadd(STREAM, {"x": "y"})
    put(store, "a")
    assert store.flush(5.0) and store.read("a").group_id == "a"  # reading delivers the others on the way
    assert store.scan() == ["a"] and store.refused == 2 and store.bytes() > 0
    assert store.flush(5.0) and client.xlen(STREAM) == 1
    store.close()
    sender.close()


def test_a_full_server_stops_admission_and_not_put(store, own_redis):
    client = connect(own_redis.url)
    client.config_set("maxmemory", "1")
    for number in range(64):
        assert store.reserve(f"{number}")
        put(store, f"{number}")
    assert not store.reserve("more")
    assert store.read("63").group_id == "63"
    client.config_set("maxmemory", "0")
    assert store.flush(10.0) and store.reserve("more")


def test_a_sender_waits_while_nobody_takes(store, own_redis):
    sender = RedisSender(own_redis.url, STREAM, max_entries=3)
    for number in range(3):
        sender.send(f"{number}", group(str(number)))
    with pytest.raises(CallTimeout, match="holds 3 units"):
        sender.send("3", group("3"), timeout_s=0.1)
    assert store.arrivals() == ["0", "1", "2"]
    store.acknowledge("0")
    store.forget(["0"])
    sender.send("3", group("3"), timeout_s=5.0)
    assert store.arrivals() == ["3"] and store.read("3").group_id == "3"
    own_redis.stop()
    threading.Timer(0.5, own_redis.start).start()
    store.acknowledge("1")
    store.forget(["1"])
    sender.send("4", group("4"), timeout_s=10.0)
    assert store.arrivals() == ["4"]
    sender.close()


def test_an_address_without_a_server_is_one_line():
    with pytest.raises(PartFailed, match=r"buffer\.url: no Redis server answers at redis://127") as caught:
        RedisStore(f"redis://127.0.0.1:{free_port()}/0", STREAM)
    assert "\n" not in str(caught.value)
    with pytest.raises(PartFailed, match=r"buffer\.url: 'http://x' is not the address"):
        RedisStore("http://x", STREAM)
