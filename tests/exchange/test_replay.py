"""Replay: what is drawn, what stays, what goes, and whose lease ends when."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np
import pytest

from exchange.units import NumberedTasks
from headrace.errors import ConfigError
from headrace.exchange.ledger import TRAINED, Ledger
from headrace.exchange.replay import EVICTED, ReplayBuffer
from headrace.exchange.staleness import Capacity, VersionLine
from headrace.exchange.stores.replay import ReplayStore
from headrace.types import Trajectory


def trajectory(name="t", steps=4, envs=2, *, version=0, start=0.0, ends=(), cuts=(), invalid=(), finals=()):
    """Step t of environment n observes start + 10 n + t, acts t and gets reward start + 10 n + t + 0.5."""
    at = start + np.arange(steps + 1)[:, None] + 10.0 * np.arange(envs)

    def flags(where):
        grid = np.zeros((steps, envs), dtype=bool)
        for t, n in where:
            grid[t, n] = True
        return grid

    return Trajectory(
        sample_id=name,
        observations={"x": at[..., None].astype(np.float32)},
        actions=np.broadcast_to(np.arange(steps)[:, None], (steps, envs)),
        rewards=(at[:-1] + 0.5).astype(np.float32),
        terminated=flags(ends),
        truncated=flags(cuts),
        valid=~flags(invalid),
        behavior_logprobs=np.full((steps, envs), -0.5, dtype=np.float32),
        policy_versions=np.full((steps, envs), version),
        ended=np.array([(t, n) for t, n, _ in finals]).reshape(-1, 2).astype(np.int64),
        final_observations={"x": np.array([[value] for *_, value in finals], dtype=np.float32)} if finals else {},
    )


def everything(store, n_steps=1, draws=64):
    """{observation: (rewards, steps, terminated, next observation)} of all that can be drawn."""
    found = {}
    for _ in range(20):
        drawn = store.draw(draws, n_steps)
        for i, x in enumerate(drawn.observations["x"][:, 0]):
            rewards = tuple(drawn.rewards[i].tolist())
            next_x = float(drawn.next_observations["x"][i, 0])
            found[float(x)] = (rewards, int(drawn.steps[i]), bool(drawn.terminated[i]), next_x)
    return found


# -------------------------------------------------------------------------------------------------------- transitions


def test_transitions_run_on_in_their_own_environment_and_stop_at_ends_and_cuts():
    store = ReplayStore(100)
    store.append("a", trajectory(steps=5, ends=[(1, 0)], cuts=[(2, 1)], finals=[(2, 1, 77.0)]))
    found = everything(store, n_steps=3)
    assert len(found) == 10
    assert found[0.0] == ((0.5, 1.5, 0.0), 2, True, 2.0), "ends with its episode"
    assert found[2.0] == ((2.5, 3.5, 4.5), 3, False, 5.0)
    assert found[11.0] == ((11.5, 12.5, 0.0), 2, False, 77.0), "a time-out leads to the true final observation"
    assert found[13.0] == ((13.5, 14.5, 0.0), 2, False, 15.0), "and so does the end of what was recorded"


def test_a_reset_row_is_never_drawn_nor_reached():
    store = ReplayStore(100)
    store.append("a", trajectory(steps=4, envs=1, ends=[(1, 0)], invalid=[(2, 0)]))
    found = everything(store, n_steps=4)
    assert sorted(found) == [0.0, 1.0, 3.0] and store.drawable == 3
    assert found[0.0] == ((0.5, 1.5, 0.0, 0.0), 2, True, 2.0)


def test_a_unit_is_read_as_it_was_written_also_across_the_border_of_the_rings():
    store = ReplayStore(25)
    for number in range(12):
        unit = trajectory(f"u{number}", start=100.0 * number, cuts=[(1, 1)], finals=[(1, 1, number)], version=number)
        store.append(f"u{number}", unit)
        for key in store.scan():
            back, start = store.read(key), 100.0 * int(key[1:])
            assert back.sample_id == key and back.oldest_version == int(key[1:])
            assert back.observations["x"][:, :, 0].tolist() == [[start + t, start + 10 + t] for t in range(5)]
            assert back.final_observations["x"].tolist() == [[float(key[1:])]]
            assert back.rewards[3].tolist() == [start + 3.5, start + 13.5] and back.truncated.sum() == 1
    assert store.scan() == ["u9", "u10", "u11"] and store.stored == 12 and store.evicted == 9
    assert {x // 100 for x in everything(store)} == {9.0, 10.0, 11.0}


def test_what_is_acknowledged_out_of_turn_is_not_drawn_and_its_place_is_used_again():
    store = ReplayStore(24)
    for number in range(3):
        store.append(f"u{number}", trajectory(start=100.0 * number))
    store.acknowledge("u1")
    assert {x // 100 for x in everything(store)} == {0.0, 2.0} and store.drawable == 16
    store.append("u3", trajectory(start=300.0))
    assert store.scan() == ["u2", "u3"], "places are given back in the order in which they were taken"


def test_units_of_other_sizes_share_the_rings():
    store = ReplayStore(50)
    for number, (steps, envs) in enumerate([(10, 2), (1, 3), (2, 20), (7, 1), (1, 1), (4, 4)]):
        store.append(f"u{number}", trajectory(steps=steps, envs=envs, start=1000.0 * number))
        assert store.drawable <= 50
    assert store.scan() == ["u3", "u4", "u5"] or store.scan() == ["u2", "u3", "u4"]
    with pytest.raises(ConfigError, match="50 steps do not hold one unit of 6 x 10 steps"):
        store.append("big", trajectory(steps=6, envs=10))


def test_as_a_store_it_replaces_counts_bytes_and_forgets():
    store = ReplayStore(100)
    store.append("a", trajectory(start=0.0))
    small = store.bytes()
    store.append("b", trajectory(start=100.0))
    store.append("a", trajectory(start=200.0))
    assert store.scan() == ["b", "a"] and store.read("a").observations["x"][0, 0, 0] == 200
    assert store.bytes() == 2 * small > 0 and {x // 100 for x in everything(store)} == {1.0, 2.0}
    store.acknowledge("b")
    store.acknowledge("never stored")
    with pytest.raises(KeyError):
        store.read("b")
    store.close()
    assert store.bytes() == 0 and store.scan() == []


# --------------------------------------------------------------------------------------------------------- priorities


def test_draws_follow_the_errors_given_back():
    store = ReplayStore(8, exponent=0.5, seed=1)
    store.append("a", trajectory())
    first = store.draw(8)
    assert sorted(first.serials) == list(range(8)), "new steps are alike, and the draw is stratified"
    store.reprioritise(np.arange(8), np.array([-16.0, 4.0, 1.0, 0, 0, 0, 0, 0]))
    serials = np.concatenate([store.draw(32).serials for _ in range(400)])
    share = np.bincount(serials, minlength=8) / serials.size
    np.testing.assert_allclose(share[:3], np.array([4, 2, 1]) / 7, atol=0.02)


def test_importance_weights_by_hand():
    store = ReplayStore(8, exponent=1.0, smallest=0.0, seed=0)
    store.append("a", trajectory(steps=2, envs=1))
    store.reprioritise(np.array([0, 1]), np.array([3.0, 1.0]))
    drawn = store.draw(8, importance=0.5)
    # (N P) ** -.5 is (2 * 3/4) ** -.5 and (2 * 1/4) ** -.5: 1 / sqrt(3) to 1
    for serial, weight in zip(drawn.serials, drawn.weights, strict=True):
        assert weight == pytest.approx({0: 1 / np.sqrt(3), 1: 1.0}[int(serial)], rel=1e-6)
    assert (store.draw(8).weights == 1).all()


def test_a_new_step_is_as_likely_as_the_largest_error_so_far():
    store = ReplayStore(16, exponent=1.0, smallest=0.0)
    store.append("a", trajectory(steps=1, envs=2))
    store.reprioritise(np.array([0, 1]), np.array([6.0, 2.0]))
    store.append("b", trajectory(steps=1, envs=1, start=50.0))
    serials = np.concatenate([store.draw(14).serials for _ in range(200)])
    np.testing.assert_allclose(np.bincount(serials) / serials.size, [6 / 14, 2 / 14, 6 / 14], atol=0.03)


def test_errors_of_evicted_steps_and_errors_that_are_no_numbers_change_nothing():
    store = ReplayStore(8, exponent=1.0, smallest=0.0)
    store.append("a", trajectory())
    store.append("b", trajectory())
    store.reprioritise(np.arange(8), np.full(8, 100.0))
    store.reprioritise(np.array([8]), np.array([np.nan]))
    assert np.bincount(store.draw(800).serials - 8, minlength=8).tolist() == [100] * 8


def test_an_empty_replay_says_so():
    with pytest.raises(ValueError, match="no valid step"):
        ReplayStore(8).draw(1)


# -------------------------------------------------------------------------------------------------------------- leases


def replay(capacity=24, *, batch=1, ahead=0, **more):
    store = ReplayStore(capacity, **{name: more.pop(name) for name in ("exponent",) if name in more})
    drops = []
    made = ReplayBuffer(
        NumberedTasks(None),
        store,
        Ledger(),
        VersionLine(),
        Capacity(batch=batch, ahead=ahead),
        on_drop=lambda lease, reason, unit: drops.append((lease.lease_id, reason)),
        **more,
    )
    made.drops = drops
    return made


async def train_one(made, **shape):
    lease = await asyncio.wait_for(made.admit(), 1.0)
    assert made.put(lease, trajectory(lease.lease_id, version=made.versions.version, **shape))
    taken = await asyncio.wait_for(made.take(1, made.versions.version), 1.0)
    made.mark_trained([lease for lease, _ in taken])
    made.versions.advance()
    assert made.settle(taken[0][0], TRAINED)
    return taken[0][0]


async def test_a_lease_ends_when_its_unit_is_evicted():
    made = replay(capacity=24)
    leases = [await train_one(made) for _ in range(3)]
    assert [lease.state for lease in leases] == ["trained"] * 3 and made.ledger.trained == 0
    assert made.room() == 1, "residents take up no room"
    made.ledger.check(made.store.scan())
    await train_one(made)
    assert leases[0].state == "settled" and leases[0].outcome == TRAINED and made.ledger.trained == 1
    assert made.settle(leases[1], TRAINED) is False, "it is settled already, only its unit stays"
    made.close()
    for lease in leases[1:]:
        assert made.settle(lease, TRAINED)
    assert made.ledger.trained == 3


async def test_a_unit_evicted_before_its_turn_is_dropped_as_that():
    made = replay(capacity=16, batch=3)
    leases = [await made.admit() for _ in range(3)]
    for lease in leases:
        made.put(lease, trajectory(lease.lease_id))
    assert made.drops == [("0-0", EVICTED)] and list(made.ready) == ["0-1", "0-2"]
    assert made.ledger.dropped[EVICTED] == 1


async def test_a_replay_too_small_for_the_batch_in_training_says_so():
    made = replay(capacity=8, batch=1, ahead=1)
    first, second = await made.admit(), await made.admit()
    made.put(first, trajectory("a"))
    await made.take(1, 0)
    with pytest.raises(ConfigError, match="8 steps do not hold the units that are being trained on: raise it"):
        made.put(second, trajectory("b"))


async def test_lag_and_use_are_reported():
    made = replay(capacity=16)
    for _ in range(2):
        await train_one(made)
    drawn = made.draw(16)
    assert set(drawn.policy_versions) == {0, 1}
    lags = made.metrics()["replay/lag"]
    assert lags.maximum == 2 and lags.mean == 1.5 and lags.weight == 16
    assert "replay/lag" not in made.metrics(), "each draw is reported once"
    assert made.store.uses("0-0") == made.store.uses("0-1") == 8
    await train_one(made)
    metrics = made.metrics()
    assert metrics["replay/uses_at_eviction"].mean == 8 and metrics["replay/evicted_units"].total == 1
    assert metrics["replay/resident_units"].total == 2 and metrics["replay/resident_steps"].total == 16


async def test_residents_beyond_the_allowed_lag_go():
    made = replay(capacity=240, max_version_lag=3)
    leases = [await train_one(made) for _ in range(6)]
    lease = await made.admit()
    made.put(lease, trajectory("new", version=6))
    await made.take(1, 6)
    assert [lease.state for lease in leases] == ["settled"] * 3 + ["trained"] * 3
    assert set(made.draw(64).policy_versions) <= {3, 4, 5, 6}


@pytest.mark.parametrize("seed", range(12))
async def test_conservation_under_random_schedules(seed):
    """stored = evicted + resident, submitted = trained + dropped + in flight, every id where the ledger says it is."""
    rng = random.Random(seed)
    made = replay(capacity=60, batch=2, ahead=rng.choice([0, 1]), max_version_lag=rng.choice([None, 3]), exponent=0.6)
    producing, taken, trained, uses = [], [], [], Counter()
    for _ in range(700):
        action = rng.choice(["admit", "put", "cancel", "take", "train", "live", "draw"])
        if action == "admit" and made.room() > 0:
            producing.append(await made.admit())
        elif action == "put" and producing:
            lease = producing.pop(rng.randrange(len(producing)))
            shape = {"steps": rng.randint(1, 5), "envs": rng.randint(1, 2)}
            assert made.put(lease, trajectory(lease.lease_id, version=made.versions.version, **shape))
        elif action == "cancel" and producing:
            assert made.settle(producing.pop(), "timeout")
        elif action == "take" and not taken and len(made.ready) >= 2:
            made._evict_stale()
            if len(made.ready) >= 2:
                taken = [lease for lease, _ in await made.take(2, made.versions.version)]
        elif action == "train" and taken:
            made.mark_trained(taken)
            made.versions.advance()
            trained, taken = trained + taken, []
        elif action == "live":
            for lease in trained:
                assert made.settle(lease, TRAINED)
            trained = []
        elif action == "draw" and made.store.drawable:
            before = {key: made.store.uses(key) for key in made.store.scan()}
            drawn = made.draw(8, n_steps=3)
            made.reprioritise(drawn.serials, np.array([rng.random() for _ in range(8)]))
            uses.update({key: made.store.uses(key) - count for key, count in before.items()})
        made.ledger.check([lease.lease_id for lease in producing] + made.store.scan())
        assert made.store.stored == made.store.evicted + len(made.store.scan())
        assert made.held() == len(producing) + len(made.ready) + len(taken) + len(trained)
        assert set(made.resident) <= set(made.store.scan())
        assert all(made.store.uses(key) == uses[key] for key in made.store.scan())
    assert made.ledger.trained > 0 and made.store.evicted > 0
