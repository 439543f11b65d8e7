"""The block table under random use: nothing leaks, nothing is given twice, what is found is what was kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.engines.native.blocks import BlockTable, prompt_key

SIZE = 2


def test_a_known_beginning_is_found_up_to_the_token_that_must_be_computed():
    table = BlockTable(8, SIZE)
    blocks = table.allocate(3)
    table.remember([1, 2, 3, 4, 5], blocks)
    assert table.find([1, 2, 3, 4, 9]) == blocks[:2]
    assert table.find([1, 2, 3, 4]) == blocks[:1]  # the last token has to run, to give logits
    assert table.find([1, 2, 9, 4, 5]) == blocks[:1]
    assert table.find([2, 2, 3, 4]) == []


def test_what_nobody_holds_is_taken_back_oldest_first_and_from_the_end_of_a_chain():
    table = BlockTable(4, SIZE)
    first, second = table.allocate(2), table.allocate(2)
    table.remember([1, 2, 3, 4], first)
    table.remember([5, 6, 7, 8], second)
    table.release(first)
    table.release(second)
    assert table.allocate(1) == [first[1]]
    assert table.find([1, 2, 3]) == first[:1]
    assert table.find([5, 6, 7, 8, 9]) == second
    assert table.allocate(1) is None


def test_prompts_are_forgotten_when_room_is_needed_and_not_before():
    table = BlockTable(3, SIZE)
    blocks = table.allocate(2)
    table.remember_prompt(prompt_key([1, 2, 3]), blocks, "logits")
    table.release(blocks)
    assert table.find_prompt(prompt_key([1, 2, 3])).logits == "logits"
    assert table.allocate(1) is not None and table.find_prompt(prompt_key([1, 2, 3])) is not None
    assert table.allocate(1) is not None and table.find_prompt(prompt_key([1, 2, 3])) is None


def test_after_clear_nothing_is_found_and_holders_keep_their_blocks():
    table = BlockTable(4, SIZE)
    held, idle = table.allocate(2), table.allocate(1)
    table.remember([1, 2, 3, 4], held)
    table.remember([9, 9], idle)
    table.release(idle)
    table.clear()
    assert table.find([1, 2, 3, 4, 5]) == []
    assert sorted(table.allocate(2)) == sorted({0, 1, 2, 3} - set(held))
    table.release(held)
    assert sorted(table.allocate(2)) == sorted(held)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(1, 7)), max_size=40))
def test_counts_never_drift(steps):
    """Sequences come, share, save prompts, go, and swaps clear: every block is free, cached or held, exactly once."""
    table = BlockTable(10, SIZE)
    live: list[tuple[list[int], list[int]]] = []
    for kind, which, length in steps:
        ids = [which % 2] * 2 + [which] * length
        if kind <= 2:
            found = table.find(ids)
            own = table.allocate(-(-len(ids) // SIZE) - len(found))
            if own is None:
                table.release(found)
            else:
                live.append((ids, found + own))
        elif kind == 3 and live:
            ids, blocks = live[which % len(live)]
            table.remember(ids, blocks)
            table.remember_prompt(prompt_key(ids), blocks, None)
        elif kind in (4, 5) and live:
            table.release(live.pop(which % len(live))[1])
        elif kind == 6 and which == 0:
            table.clear()
        held = [0] * 10
        for _, blocks in live:
            assert len(set(blocks)) == len(blocks)
            for block in blocks:
                held[block] += 1
        assert all(count >= need for count, need in zip(table.counts, held, strict=True))
        assert not any(table.counts[block] for block in table._free)
        assert not any(table.counts[block] for block in table._cached)
    for _, blocks in live:
        table.release(blocks)
    table.clear()
    assert sorted(table.allocate(10)) == list(range(10))
