"""Counts that must add up, whatever is done to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConservationError
from headrace.exchange.ledger import Ledger
from headrace.protocols import Lease
from headrace.types import Task


def lease(name: str = "a") -> Lease:
    return Lease(lease_id=name, index=0, task=Task(task_id=name, source="", payload={}))


PATHS = {
    "admitted": [],
    "ready": ["ready"],
    "taken": ["ready", "taken"],
    "trained": ["ready", "taken", "trained"],
}


@pytest.mark.parametrize("state", PATHS)
@pytest.mark.parametrize("step", ["ready", "taken", "trained"])
def test_only_the_drawn_steps_are_legal(state, step):
    ledger, one = Ledger(), lease()
    ledger.admit(one)
    for move in PATHS[state]:
        ledger.move(one, move)
    legal = {("admitted", "ready"), ("ready", "taken"), ("taken", "trained"), ("taken", "ready")}
    if (state, step) in legal:
        ledger.move(one, step)
    else:
        with pytest.raises(ConservationError) as broken:
            ledger.move(one, step)
        assert broken.value.ids == ["a"] and one.state == state


@pytest.mark.parametrize(
    "state, outcome", [("taken", "timeout"), ("taken", "stopped"), ("ready", "trained"), ("trained", "stale")]
)
def test_outcomes_that_a_state_does_not_allow(state, outcome):
    ledger, one = Ledger(), lease()
    ledger.admit(one)
    for move in PATHS[state]:
        ledger.move(one, move)
    with pytest.raises(ConservationError):
        ledger.settle(one, outcome)
    assert ledger.in_flight == {"a": one}, "a refused outcome changes nothing"


def test_a_lease_admitted_twice_is_named():
    ledger, one = Ledger(), lease()
    ledger.admit(one)
    with pytest.raises(ConservationError) as broken:
        ledger.admit(one)
    assert broken.value.ids == ["a"]


@pytest.mark.parametrize("found, at_fault", [([], ["a"]), (["a", "b"], ["b"]), (["a", "a"], ["a"])])
def test_a_census_that_does_not_match_names_the_ids(found, at_fault):
    ledger = Ledger()
    ledger.admit(lease())
    ledger.check(["a"])
    with pytest.raises(ConservationError) as broken:
        ledger.check(found)
    assert broken.value.ids == at_fault


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["admit", "ready", "taken", "trained", "settle", "drop"])))
)
def test_submitted_is_trained_plus_dropped_plus_in_flight_after_any_history(history):
    ledger, leases = Ledger(), {}
    for number, action in history:
        one = leases.setdefault(number, lease(str(number)))
        try:
            if action == "admit":
                if one.state != "settled":
                    ledger.admit(one)
            elif one.lease_id not in ledger.in_flight and one.state != "settled":
                continue
            elif action in ("settle", "drop"):
                ledger.settle(one, "trained" if action == "settle" else "timeout")
            else:
                ledger.move(one, action)
        except ConservationError:
            pass
        ledger.check(list(ledger.in_flight))
        assert ledger.submitted == ledger.trained + sum(ledger.dropped.values()) + len(ledger.in_flight)


def test_restored_counts_add_up_with_what_was_in_flight_left_to_admit_anew():
    ledger = Ledger()
    leases = [lease(str(number)) for number in range(4)]
    for one in leases:
        ledger.admit(one)
    for move in PATHS["trained"]:
        ledger.move(leases[0], move)
    ledger.settle(leases[1], "stale")
    restored = Ledger()
    restored.restore(ledger.state())
    assert (restored.trained, dict(restored.dropped), restored.submitted) == (1, {"stale": 1}, 2)
    restored.check([])
