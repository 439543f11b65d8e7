"""The block table under random use: nothing leaks, nothing is given twice, what is found is what was kept."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.rollout.engines.native.blocks import BlockTable

SIZE = 2


def found(table, ids, **more):
    match = table.match(ids, **more)
    return match.blocks, match.tail, match.tail_tokens, match.end


def test_a_known_beginning_is_found_up_to_the_token_that_must_be_computed():
    table = BlockTable(8, SIZE)
    blocks = table.allocate(3)
    table.remember([1, 2, 3, 4, 5], blocks)
    assert found(table, [1, 2, 3, 4, 9]) == (blocks[:2], -1, 0, None)
    assert found(table, [1, 2, 3, 4, 5, 9]) == (blocks[:2], blocks[2], 1, None)
    assert found(table, [1, 2, 3, 4]) == (blocks[:1], blocks[1], 1, None)  # the last token has to run, to give logits
    assert found(table, [1, 2, 3, 4], leave_one=False) == (blocks[:2], -1, 0, None)
    assert found(table, [1, 2, 3, 9, 5]) == (blocks[:1], blocks[1], 1, None)
    assert found(table, [2, 2, 3, 4]) == ([], -1, 0, None)
    assert found(table, [1]) == ([], -1, 0, None)


def test_branches_part_where_their_tokens_do():
    table = BlockTable(8, SIZE)
    first, second = table.allocate(3), table.allocate(3)
    table.remember([1, 2, 3, 4, 5, 6], first)
    table.remember([1, 2, 3, 9, 7, 8], [first[0], *second[1:]])
    assert found(table, [1, 2, 3, 4, 5, 6, 0])[0] == first
    assert found(table, [1, 2, 3, 9, 7, 8, 0])[0] == [first[0], *second[1:]]
    assert found(table, [1, 2, 3, 7])[:3] == ([first[0]], first[1], 1)


def test_a_block_that_its_holder_fills_further_is_known_for_more():
    table = BlockTable(4, 4)
    blocks = table.allocate(1)
    table.remember([1, 2], blocks, "after 2")
    table.remember([1, 2, 3, 4], blocks)
    assert found(table, [1, 2, 3, 4, 5]) == (blocks, -1, 0, None)
    assert found(table, [1, 2]) == ([], blocks[0], 2, "after 2")
    assert found(table, [1, 2, 3]) == ([], blocks[0], 2, None)


def test_what_nobody_holds_is_taken_back_oldest_first_and_from_the_end_of_a_branch():
    table = BlockTable(4, SIZE)
    first, second = table.allocate(2), table.allocate(2)
    table.remember([1, 2, 3, 4], first)
    table.remember([5, 6, 7, 8], second)
    table.release(first)
    table.release(second)
    assert table.allocate(1) == [first[1]]
    table.hold(table.match([1, 2, 3]).blocks)
    assert table.match([5, 6, 7, 8, 9]).blocks == second
    table.hold(second)
    assert table.allocate(1) is None


def test_what_is_used_again_stays_longest():
    table = BlockTable(4, SIZE)
    first, second = table.allocate(2), table.allocate(2)
    for ids, blocks in (([1, 2, 3, 4], first), ([5, 6, 7, 8], second)):
        table.remember(ids, blocks)
        table.release(blocks)
    table.remember([1, 2, 3, 4], first)  # another one came by with the same tokens
    assert sorted(table.allocate(2)) == sorted(second)
    assert table.match([1, 2, 3, 4, 5]).blocks == first


def test_a_beginning_that_goes_takes_what_continues_it_along():
    table = BlockTable(3, SIZE)
    mine, other = table.allocate(2), table.allocate(1)
    table.remember([1, 2], other)
    table.remember([1, 2, 3, 4], mine)  # continues a block that it does not hold
    table.release(other)
    assert table.allocate(1) == other
    assert table.match([1, 2, 3, 4, 5]).blocks == []
    table.release(mine)
    assert sorted(table.allocate(2)) == sorted(mine)


def test_ends_are_forgotten_with_their_block_and_when_there_are_too_many():
    table = BlockTable(80, SIZE)
    for i in range(70):
        table.remember([i, i], table.allocate(1), end=i)
    assert [table.match([i, i]).end for i in range(70)] == [None] * 6 + list(range(6, 70))
    for block in range(80):
        table.counts[block] = 0
    table.clear()
    assert table.match([69, 69]).end is None


def test_an_end_is_found_whatever_went_on_from_there():
    """Siblings continue a prompt whose end is remembered: the tree then holds many blocks that begin with it."""
    for mine, others in (([9, 9], ([1, 1], [2, 2])), ([1, 1], ([9, 9], [5, 5])), ([5, 5], ([5, 6], [5, 5]))):
        table = BlockTable(16, 4)
        prompt = table.allocate(2)
        table.remember([1, 2, 3, 4, 5, 6], prompt, "end")
        table.remember([1, 2, 3, 4, 5, 6, *mine], prompt)
        for other in others:
            table.remember([1, 2, 3, 4, 5, 6, *other], [prompt[0], *table.allocate(1)])
        assert found(table, [1, 2, 3, 4, 5, 6]) == (prompt[:1], prompt[1], 2, "end")


def test_of_blocks_that_hold_the_same_the_right_one_is_taken_back():
    table = BlockTable(4, SIZE)
    first, second = table.allocate(1), table.allocate(1)
    table.remember([1], first)
    table.remember([1, 3], second)
    table.remember([1, 3], first)
    table.release(first)
    table.release(second)
    assert table.allocate(4) is not None
    assert found(table, [1, 3, 4]) == ([], -1, 0, None)


def test_after_clear_nothing_is_found_and_holders_keep_their_blocks():
    table = BlockTable(4, SIZE)
    held, idle = table.allocate(2), table.allocate(1)
    table.remember([1, 2, 3, 4], held)
    table.remember([9, 9], idle)
    table.release(idle)
    table.clear()
    assert table.match([1, 2, 3, 4, 5]).blocks == []
    assert sorted(table.allocate(2)) == sorted({0, 1, 2, 3} - set(held))
    table.release(held)
    assert sorted(table.allocate(2)) == sorted(held)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.integers(1, 7)), max_size=40))
def test_counts_never_drift(steps):
    """Sequences come, share, save prompts, go, and swaps clear: every block is free, cached or held, exactly once."""
    table = BlockTable(10, SIZE)
    live: list[tuple[list[int], list[int]]] = []
    content: dict[int, list[int]] = {}
    for kind, which, length in steps:
        ids = [which % 2] * 2 + [which] * length
        if kind <= 2:
            match = table.match(ids)
            shared = match.blocks + [match.tail] * (match.tail_tokens > 0)
            table.hold(shared)
            own = table.allocate(-(-len(ids) // SIZE) - len(match.blocks))
            if own is None:
                table.release(shared)
            else:
                table.release(shared[len(match.blocks) :])
                held = match.blocks + own
                for block, part in zip(match.blocks, range(0, len(ids), SIZE), strict=False):
                    assert content[block] == ids[part : part + SIZE]
                for block, part in zip(held, range(0, len(ids), SIZE), strict=True):
                    content[block] = ids[part : part + SIZE]
                live.append((ids, held))
        elif kind == 3 and live:
            ids, blocks = live[which % len(live)]
            table.remember(ids, blocks, end=1)
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
        assert set(table._cached) <= set(table._nodes) and not set(table._free) & set(table._nodes)
        assert len(table._free) + len(table._cached) + sum(count > 0 for count in table.counts) == 10
    for _, blocks in live:
        table.release(blocks)
    table.clear()
    assert sorted(table.allocate(10)) == list(range(10))
