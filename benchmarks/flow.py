"""Units through each store, beside a plain queue of the same kind: groups/s and MB/s, medians of interleaved pairs.

    python benchmarks/flow.py [--rounds 9] [--seconds 0.4] [--stores memory,shared_memory,files,redis]

A group is put, read and acknowledged by one process (as a controller does it). The plain queue of a kind carries the same
encoded bytes and promises less:

    memory          queue.SimpleQueue of the objects
    shared_memory   a multiprocessing pipe: encoded bytes written and read
    files           bytes appended to a file and read back; no checksum, no second look after a crash
    redis           a list, RPUSH and LPOP: no consumer group, no second delivery, lost when its reader dies

`append` says how long the event loop stands still for one group; with redis the server's part happens in a thread. The last
line has a producer in another process: places of slots through a pipe, beside a multiprocessing queue that pickles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.exchange.codec import decode_unit, encode
from headrace.exchange.stores import AVAILABLE, open_store
from headrace.exchange.stores.memory import unit_bytes
from headrace.types import Episode, Group, SamplingParams, Score, Task, TokenSample

SIZES = {"8 x 192 tokens": (8, 192), "8 x 2,048 tokens": (8, 2048)}
IN_FLIGHT = 16


def make_group(name: str, members: int, tokens: int) -> Group:
    generator = np.random.default_rng(0)

    def sample(member: int) -> TokenSample:
        return TokenSample(
            sample_id=f"{name}/{member}",
            token_ids=generator.integers(0, 50_000, tokens),
            loss_mask=np.ones(tokens, np.int8),
            behavior_logprobs=generator.random(tokens, np.float32),
            policy_versions=np.zeros(tokens, np.int64),
            sampling=SamplingParams(seed=1),
            finish_reason="stop",
        )

    episodes = tuple(Episode(episode_id=f"{name}/{m}", samples=(sample(m),)) for m in range(members))
    task = Task(task_id=name, source="benchmark", payload={"prompt": "x" * 200})
    return Group(
        group_id=name, task=task, expected_size=members, episodes=episodes, scores=(Score(reward=1.0),) * members
    )


# ------------------------------------------------------------------------------------------------ one put-and-read each


def through_store(store: Any, group: Group) -> Callable[[], float]:
    """Pass `IN_FLIGHT` groups; the seconds that `append` took of it."""
    count = iter(range(1 << 60))

    def turn() -> float:
        keys = [f"0-{next(count)}" for _ in range(IN_FLIGHT)]
        spent = 0.0
        for key in keys:
            store.reserve(key)
            started = time.perf_counter()
            store.append(key, group)
            spent += time.perf_counter() - started
        for key in keys:
            assert store.read(key).group_id == group.group_id
        for key in keys:
            store.acknowledge(key)
        return spent

    return turn


def through_plain(put: Callable[[Group], None], get: Callable[[], Group]) -> Callable[[], float]:
    def turn() -> float:
        for _ in range(IN_FLIGHT):
            put(GROUP[0])
        for _ in range(IN_FLIGHT):
            assert get().group_id == GROUP[0].group_id
        return 0.0

    return turn


GROUP: list[Group] = []


@contextmanager
def plain_memory(folder: Path, url: str) -> Iterator[Callable[[], float]]:
    line: queue.SimpleQueue[Group] = queue.SimpleQueue()
    yield through_plain(line.put, line.get)


@contextmanager
def plain_shared_memory(folder: Path, url: str) -> Iterator[Callable[[], float]]:
    """One group at a time: a pipe that is full would wait for its own process."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)

    def turn() -> float:
        for _ in range(IN_FLIGHT):
            data = encode(GROUP[0])
            sent, got = 0, bytearray()
            while len(got) < len(data):
                if sent < len(data):
                    sent += writer.send(memoryview(data)[sent : sent + (1 << 17)])
                got += reader.recv(1 << 17)
            decode_unit(bytes(got))
        return 0.0

    yield turn
    reader.close()
    writer.close()


@contextmanager
def plain_files(folder: Path, url: str) -> Iterator[Callable[[], float]]:
    path = folder / "plain.log"
    with path.open("ab", buffering=0) as out, path.open("rb", buffering=0) as back:
        sizes: list[int] = []

        def put(group: Group) -> None:
            sizes.append(out.write(encode(group)))

        yield through_plain(put, lambda: decode_unit(back.read(sizes.pop(0))))


@contextmanager
def plain_redis(folder: Path, url: str) -> Iterator[Callable[[], float]]:
    import redis

    client = redis.Redis.from_url(url)
    yield through_plain(lambda group: client.rpush("plain", encode(group)), lambda: decode_unit(client.lpop("plain")))
    client.close()


PLAIN = {"memory": plain_memory, "shared_memory": plain_shared_memory, "files": plain_files, "redis": plain_redis}


# ------------------------------------------------------------------------------------------------------------ measuring


def timed(turn: Callable[[], float], seconds: float) -> tuple[float, float]:
    """(groups a second, milliseconds of `append` a group)."""
    groups, spent, started = 0, 0.0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        spent += turn()
        groups += IN_FLIGHT
    return groups / elapsed, spent / groups * 1e3


def measure(kind: str, options: argparse.Namespace, url: str) -> None:
    for size, (members, tokens) in SIZES.items():
        GROUP[:] = [make_group("g", members, tokens)]
        megabytes = unit_bytes(GROUP[0]) / 1e6
        with tempfile.TemporaryDirectory() as name, PLAIN[kind](Path(name), url) as plain:
            store = open_store(kind, folder=f"{name}/store", url=url, keep_acknowledged=False)
            turn = through_store(store, GROUP[0])
            timed(turn, 0.1), timed(plain, 0.1)
            pairs = [(timed(turn, options.seconds), timed(plain, options.seconds)) for _ in range(options.rounds)]
            store.close()
        rates = [store_rate for (store_rate, _), _ in pairs]
        ratios = [store_rate / plain_rate for (store_rate, _), (plain_rate, _) in pairs]
        print(
            f"| {kind} | {size} | {statistics.median(rates):,.0f} | {statistics.median(rates) * megabytes:,.0f} "
            f"| {statistics.median(rate for _, (rate, _) in pairs):,.0f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
            f"| {statistics.median(spent for (_, spent), _ in pairs):.3f} |",
            flush=True,
        )


# ---------------------------------------------------------------------------------------------------- another process


def produce_places(pipe: Any, members: int, tokens: int) -> None:
    from headrace.exchange.stores.shared_memory import Arena

    arena, group = Arena(), make_group("g", members, tokens)
    while pipe.recv():
        pipe.send([arena.write(group) for _ in range(IN_FLIGHT)])
    arena.close()


def produce_pickles(line: Any, wanted: Any, members: int, tokens: int) -> None:
    group = make_group("g", members, tokens)
    while wanted.recv():
        for _ in range(IN_FLIGHT):
            line.put(group)


def between_processes(options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    for size, (members, tokens) in SIZES.items():
        ours, theirs = context.Pipe()
        line, (asks, hears) = context.Queue(), context.Pipe()
        workers = [
            context.Process(target=produce_places, args=(theirs, members, tokens)),
            context.Process(target=produce_pickles, args=(line, hears, members, tokens)),
        ]
        for worker in workers:
            worker.start()
        store = open_store("shared_memory")

        def places(ours: Any = ours, store: Any = store) -> float:
            ours.send(True)
            for number, ref in enumerate(ours.recv()):
                store.adopt(str(number), ref)
            for number in range(IN_FLIGHT):
                store.read(str(number))
                store.acknowledge(str(number))
            return 0.0

        def pickles(asks: Any = asks, line: Any = line) -> float:
            asks.send(True)
            for _ in range(IN_FLIGHT):
                line.get()
            return 0.0

        timed(places, 0.2), timed(pickles, 0.2)
        pairs = [(timed(places, options.seconds)[0], timed(pickles, options.seconds)[0]) for _ in range(options.rounds)]
        ours.send(False)
        asks.send(False)
        for worker in workers:
            worker.join()
        ratios = [one / other for one, other in pairs]
        rate = statistics.median(one for one, _ in pairs)
        megabytes = members * tokens * 21 / 1e6
        print(
            f"| slots, from another process | {size} | {rate:,.0f} | {rate * megabytes:,.0f} "
            f"| {statistics.median(other for _, other in pairs):,.0f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) | |"
        )
        store.close()


@contextmanager
def redis_server() -> Iterator[str]:
    """A server of our own that keeps everything: its log is flushed once a second."""
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed; leave redis out of --stores")
    with socket.socket() as sock, tempfile.TemporaryDirectory() as folder:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        sock.close()
        words = ["redis-server", "--port", str(port), "--dir", folder, "--save", "", "--appendonly", "yes"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--stores", default=",".join(AVAILABLE))
    options = parser.parse_args()
    print("| store | group | groups/s | MB/s | plain queue, groups/s | of it (range) | append, ms |")
    print("|---|---|---|---|---|---|---|")
    for kind in options.stores.split(","):
        if kind == "redis":
            with redis_server() as url:
                measure(kind, options, url)
        else:
            measure(kind, options, "")
    if "shared_memory" in options.stores:
        between_processes(options)


if __name__ == "__main__":
    main()
