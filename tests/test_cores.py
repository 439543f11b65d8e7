"""Parts of one work have a core each, and leave the caller's threads as they were."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from headrace.cores import WORTH_MEETING, Crew, copy_beside, threads_for, use_threads, work_beside
from headrace.pages import LARGE, LargePages


def test_a_part_that_fails_fails_the_whole_after_the_others_ended():
    ended = []

    def slow():
        threading.Event().wait(0.05)
        ended.append(True)

    def broken():
        raise ValueError("this part")

    with pytest.raises(ValueError, match="this part"):
        Crew().run([broken, slow])
    assert ended


def test_a_thread_keeps_its_number_whatever_others_set_before_it_asks():
    before, found, set_ = torch.get_num_threads(), [], threading.Event()
    go_on = threading.Event()

    def passes():
        use_threads(2)
        set_.set()
        go_on.wait(10)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=passes)
    thread.start()
    set_.wait(10)
    torch.set_num_threads(1)
    go_on.set()
    thread.join()
    torch.set_num_threads(before)
    assert found == [2]


def test_parts_have_one_thread_each_and_leave_the_callers_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        crew_ = Crew()
        assert crew_.run([torch.get_num_threads, torch.get_num_threads]) == [1, 1]
        assert torch.get_num_threads() == 2
        fresh = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert fresh == [2]
    finally:
        torch.set_num_threads(before)


def test_small_passes_run_on_one_thread_and_what_the_caller_had_comes_back():
    before = torch.get_num_threads()
    try:
        use_threads(2)
        with threads_for(WORTH_MEETING):
            assert torch.get_num_threads() == 2
        with pytest.raises(ValueError), threads_for(WORTH_MEETING - 1):
            assert torch.get_num_threads() == 1
            raise ValueError
        assert torch.get_num_threads() == 2
    finally:
        use_threads(before)


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5000, 999), (3, 700_000), (40, 17_000, 8)])
def test_a_copy_beside_passes_is_whole_and_rests_only_while_they_run(shape, monkeypatch):
    rests, busy = [], [True]
    monkeypatch.setattr(time, "sleep", rests.append)
    source = torch.randn(shape)

    def beside():
        work_beside(lambda: busy[0])
        for _ in range(2):
            made = torch.full(shape, 7.0)
            copy_beside(made, source)
            assert torch.equal(made, source)
            counts.append(len(rests))
            busy[0] = False

    counts: list[int] = []
    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert len(counts) == 2
    assert counts[0] == counts[1], "it rested though nothing ran"
    assert (counts[0] > 1) == (source.numel() > 1 << 20)
    before = len(rests)
    copy_beside(torch.zeros(shape), source)
    assert len(rests) == before, "a thread that never stood back rested"


def test_large_pages_are_shared_out_and_live_as_long_as_what_was_taken():
    pages = LargePages(3 * LARGE)
    pieces = [pages.take((256, 1024), torch.float32), pages.take((7, 3), torch.int8), pages.take((5,), torch.bfloat16)]
    assert pieces[0].data_ptr() % LARGE == 0 and all(piece.data_ptr() % 64 == 0 for piece in pieces)
    for number, piece in enumerate(pieces):
        piece.fill_(number + 1)
    elsewhere = pages.take((4 * LARGE,), torch.uint8).fill_(9)
    del pages
    assert [piece.float().mean().item() for piece in (*pieces, elsewhere)] == [1, 2, 3, 9]
    assert LargePages(0).take((0, 4), torch.float32).shape == (0, 4)
