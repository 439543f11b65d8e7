"""Trajectories that stay where their actor wrote them: a place comes back, and the batch is what was recorded."""

from __future__ import annotations

import pickle

import pytest

from exchange.units import buffer
from headrace.exchange.stores import open_store
from headrace.exchange.stores.shared_memory import Placed
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.placing import build_placing
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.policies.config import PolicyConfig
from headrace.rollout.config import EnvConfig
from headrace.rollout.control_rollout import ControlRollout, build_actor


@pytest.mark.parametrize("watched", [False, True])
async def test_a_place_travels_and_the_trajectory_is_read_where_it_lies(watched):
    """watched: the dispatcher notes the oldest version of each running group (`staleness.cancel_group`)."""
    runtime, dispatcher = LocalRuntime(lambda event: None), Dispatcher(generate_timeout_s=30.0, rejoin_timeout_s=1.0)
    dispatcher.oldest = {} if watched else None
    env = EnvConfig(id="CartPole-v1", count=4, steps=64)
    plain = await runtime.spawn("engine-0", build_actor, env, PolicyConfig(), None, 3)
    placing = await runtime.spawn("engine-0", build_placing, build_actor, env, PolicyConfig(), None, 3)
    dispatcher.join(EngineSlot("engine-0", placing))
    dispatcher.open_gate()
    flow = buffer(batch=1, store=open_store("shared_memory"))
    rollout = ControlRollout(dispatcher, retries=0)
    for _ in range(2):
        lease = await flow.admit()
        placed = await rollout(lease)
        assert isinstance(placed, Placed) and len(pickle.dumps(placed)) < 400
        assert flow.put(lease, placed)
        [(taken, unit)] = await flow.take(1, 0)
        assert taken is lease and unit.sample_id == lease.lease_id and unit.size == placed.size
        same = await ControlRollout(plain, retries=0)(lease)  # an actor of the same seed, in this process
        assert unit.observations["obs"].tobytes() == same.observations["obs"].tobytes()
        flow.mark_trained([taken])
        flow.settle(taken, "trained")
    assert flow.store.bytes() == 0
    await runtime.close()
    flow.store.close()
