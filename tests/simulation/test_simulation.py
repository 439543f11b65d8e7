"""A run's config on a simulated cluster: what follows from the costs, what is refused, and that it repeats."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import threading
from dataclasses import replace

import pytest

from headrace.config import load_config, resolve
from headrace.configbase import build
from headrace.errors import ConfigError, Stalled
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.simulation.cluster import CLUSTER_FILE, ClusterConfig, load_cluster, with_workload
from headrace.simulation.run import flow_of, simulate, simulate_flow

SMALL = {
    "generation": {"engines": 2, "rates": [[1, 50.0], [64, 1600.0]], "max_running": 64},
    "training": {"tokens_per_s": 4000.0, "step_s": 1.0},
    "transport": {"default": {"publish_s": 0.1, "prepare_s": 0.2, "commit_s": 0.01}},
    "workload": {
        "median_tokens": 300.0,
        "sigma": 0.8,
        "max_tokens": 2048,
        "prompt_tokens": 64,
        "groups": 8,
        "group_size": 4,
    },
}


def cluster(**tables) -> ClusterConfig:
    merged = {name: {**SMALL.get(name, {}), **table} for name, table in tables.items()}
    return build(ClusterConfig, {**SMALL, **merged}, "")


def run(*overrides: str, on: ClusterConfig | None = None, **options):
    _, outcome = simulate(load_config("tiny", ["training.steps=8", *overrides]), on or cluster(), **options)
    assert outcome.error is None, outcome.error
    return outcome


def test_the_same_seed_gives_the_same_event_log():
    failing = cluster(failures={"engine_mtbf_s": 60.0, "restart_s": 5.0, "failed_scores": 0.02})
    logs = [run(f"seed={seed}", on=failing).flow.watcher.events for seed in (0, 0, 1)]
    assert logs[0] == logs[1] != logs[2]
    assert any(event.kind == "fenced" for event in logs[0])


def test_separate_hides_training_behind_generation_and_sync_does_not():
    sync, separate = run("placement=sync"), run("placement=separate")
    assert separate.seconds < 0.85 * sync.seconds
    assert sync.controller.ledger.trained == separate.controller.ledger.trained == 64


def test_a_deeper_queue_buys_throughput_with_lag():
    double, queue = run("buffer.depth=double"), run("buffer.depth=queue", "buffer.steps=4")
    lag = [sum(sum(r.lags) for r in o.flow.watcher.reports) for o in (double, queue)]
    assert queue.seconds < double.seconds and lag[1] > lag[0]


def test_grain_changes_memory_and_not_the_result():
    fine, coarse = run(on=cluster()), run(on=cluster(workload={"grain": 8}))
    assert coarse.seconds == pytest.approx(fine.seconds, rel=0.1)
    lengths = [sum(o.flow.watcher.tally.seen.values()) for o in (fine, coarse)]
    assert lengths[0] == lengths[1]


def test_tasks_of_like_length_together_cut_the_wait_for_the_longest():
    """Tasks come again, so their lengths are known from the second epoch on; nothing is lost for it."""
    on = cluster(workload={"tasks": 64, "task_sigma": 1.0, "sigma": 0.1, "median_tokens": 200.0})
    plain, buckets = (
        run("placement=sync", "training.steps=40", f"rollout.order={order}", on=on)
        for order in ("source", "length_bucket")
    )
    waits = [sum(report.wait_batch_s for report in o.flow.watcher.reports[8:]) for o in (plain, buckets)]
    assert waits[1] < 0.7 * waits[0]
    assert plain.controller.ledger.trained == buckets.controller.ledger.trained == 320
    tokens = [sum(engine.drawn_tokens for engine in o.engines) for o in (plain, buckets)]
    assert tokens[1] == pytest.approx(tokens[0], rel=0.05)


def test_an_interrupted_simulation_ends_without_a_word_of_its_parts(monkeypatch):
    """Whatever is thrown away unended when the loop is closed would be told to the hook."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    def interrupted(loop, controller, engines):
        loop.call_at(100.0, signal.raise_signal, signal.SIGINT)

    config = resolve(with_workload(load_config("tiny", ["training.steps=1000"]), cluster()))
    with pytest.raises(KeyboardInterrupt):
        simulate_flow(replace(flow_of(config, cluster()), faults=interrupted))
    gc.collect()
    assert not told


def test_it_stops_after_the_time_it_is_given():
    outcome = run(for_s=120.0, keep=False)
    assert 120 <= outcome.seconds < 240 and outcome.state == "stopped" and not outcome.flow.watcher.events


@pytest.mark.parametrize(
    "tables, expected",
    [
        ({"generation": {"rates": []}}, "generation.rates: found []"),
        (
            {"generation": {"rates": [[8, 10.0], [1, 5.0]]}},
            "generation.rates: found [[8, 10.0], [1, 5.0]], expected ascending",
        ),
        ({"generation": {"rates": [[1, 1e-300]]}}, "generation.rates: found [[1, 1e-300]], expected ascending"),
        ({"transport": {"fliesystem": {}}}, "transport.fliesystem: is no channel; use one of"),
        ({"training": {"step_s": float("inf")}}, "training.step_s: found inf, expected a number >= 0 and <= 1e+09"),
        ({"generation": {"ratse": []}}, "generation.ratse: unknown key (did you mean 'rates'?)"),
        ({"workload": {"median_tokens": 0}}, "workload.median_tokens: found 0, expected a number >= 1e-06"),
    ],
)
def test_a_wrong_cluster_file_gives_one_line(tmp_path, tables, expected):
    import tomli_w

    file = tmp_path / "mine.toml"
    file.write_text(tomli_w.dumps(tables))
    with pytest.raises(ConfigError) as refused:
        load_cluster(file)
    assert str(refused.value).startswith(expected)


def test_a_channel_without_costs_is_named():
    with pytest.raises(ConfigError, match=r"transport\.shared_memory: missing; the file names http"):
        simulate(load_config("tiny", []), build(ClusterConfig, {"transport": {"http": {}}}, ""))


def test_the_shipped_cluster_costs_every_channel_and_says_from_where():
    shipped = load_cluster("cluster.toml")
    for channel in ("in_process", "shared_memory", "collective", "ipc", "filesystem", "http", "mesh"):
        shipped.transport_of(channel)
    assert "default" not in shipped.transport
    for line in CLUSTER_FILE.read_text().splitlines():
        if line.startswith(("[transport.", "rates", "tokens_per_s", "engines")):
            assert "[survey]" in line or "[own]" in line or "[figure]" in line or line.startswith("rates"), line


async def _executor():
    await asyncio.to_thread(int)


async def _thread():
    loop = asyncio.get_running_loop()
    failures = []

    def call():
        try:
            loop.call_soon_threadsafe(int)
        except Stalled as error:
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise failures[0]


async def _socket():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.setblocking(False)
        listening.listen()
        await asyncio.get_running_loop().sock_accept(listening)


async def _signal():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, int)


async def _never():
    await asyncio.Event().wait()


@pytest.mark.parametrize("story", [_executor, _thread, _socket, _signal, _never])
def test_the_loop_refuses_what_is_real_and_knows_a_deadlock(story):
    with pytest.raises(Stalled):
        run_simulated(story())
