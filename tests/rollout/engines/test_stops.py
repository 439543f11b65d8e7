"""How generations end: several end tokens, stop strings over token borders, minimum and maximum lengths."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.errors import RequestRefused
from rollout.engines.engine_models import END, ask, build_engine, char_tokenizer, endless, folder_of, prompt_of

KINDS = ("native", "hf")


@pytest.fixture(params=KINDS)
async def engine(request):
    made = build_engine(request.param)
    yield made
    await made.close()


def text_of(generation) -> str:
    return char_tokenizer().decode(generation.token_ids.tolist())


async def test_a_request_may_name_end_tokens_of_its_own(engine):
    plain = await engine.generate(ask(prompt_of(5), **endless(30)))
    for at in (3, 11):
        token = int(plain.token_ids[at])
        first = plain.token_ids.tolist().index(token)
        got = await engine.generate(ask(prompt_of(5), f"s{at}", max_tokens=30, stop_token_ids=(token, 96)))
        ends = [i for i, t in enumerate(got.token_ids.tolist()) if t in (token, 96, END)]
        assert ends == [got.token_ids.size - 1] and got.finish_reason == "stop"
        assert got.matched_stop == got.token_ids[-1] and got.token_ids.size <= first + 1


@pytest.mark.parametrize("width", [1, 2, 3, 5])
async def test_a_stop_string_ends_where_it_is_complete_across_token_borders(engine, width):
    plain = await engine.generate(ask(prompt_of(5), **endless(30)))
    text = text_of(plain)
    stop = text[9 : 9 + width]
    expected = text.index(stop) + width
    # Banning no end token keeps the draws the same as above up to the stop: the model's own may come first.
    got = await engine.generate(ask(prompt_of(5), f"w{width}", **endless(30), stop=("zzzz", stop)))
    assert got.token_ids.size == 30  # not before min_tokens
    got = await engine.generate(
        ask(prompt_of(5), f"v{width}", max_tokens=30, min_tokens=expected - 1, stop=("zzzz", stop))
    )
    assert got.token_ids.tolist() == plain.token_ids[:expected].tolist()
    assert (got.finish_reason, got.matched_stop) == ("stop", stop)


async def test_of_two_stop_strings_the_one_that_ends_first_counts(engine):
    plain = await engine.generate(ask(prompt_of(5), **endless(30)))
    text = text_of(plain)
    early, late = text[4:6], text[10:13]
    assert text.index(early) < text.index(late)
    got = await engine.generate(ask(prompt_of(5), "two", max_tokens=30, min_tokens=4, stop=(late, early)))
    assert got.matched_stop == early


async def test_a_stop_string_in_the_prompt_does_not_count(engine):
    tokenizer = char_tokenizer()
    prompt = [tokenizer.convert_tokens_to_ids(c) for c in "ENDE"]
    got = await engine.generate(ask(prompt, **endless(4), stop=("END",)))
    assert got.token_ids.size == 4


async def test_min_tokens_holds_the_end_back(engine):
    got = await asyncio.gather(
        *(engine.generate(ask(prompt_of(4, i), f"m{i}", member=i, max_tokens=40, min_tokens=25)) for i in range(6))
    )
    assert all(one.token_ids.size >= 25 and END not in one.token_ids[:25].tolist() for one in got)


async def test_the_context_is_an_end_too():
    for kind in KINDS:
        engine = build_engine(kind, context_length=20)
        got = await engine.generate(ask(prompt_of(15), **endless(40)))
        assert got.token_ids.size == 5 and got.finish_reason == "length"
        with pytest.raises(RequestRefused, match="context of 20"):
            await engine.generate(ask(prompt_of(20), "b"))
        await engine.close()


async def test_stop_strings_without_a_tokenizer_are_refused():
    engine = build_engine(folder=folder_of("llama", tokenizer=False))
    with pytest.raises(RequestRefused, match="tokenizer"):
        await engine.generate(ask(prompt_of(4), stop=("x",)))
    await engine.close()


async def test_the_sampling_mask_is_recorded_for_every_token_and_survives_a_resume(engine):
    request = ask(prompt_of(5), top_k=4, record_sampling_mask=True, **endless(12))
    whole = await engine.generate(request)
    mask = whole.sampling_mask
    assert mask.offsets.tolist() == [4 * i for i in range(13)]
    for at, token in enumerate(whole.token_ids.tolist()):
        assert token in mask.token_ids[mask.offsets[at] : mask.offsets[at + 1]]
    from dataclasses import replace

    from headrace.rollout.engines.sequences import join_masks, split_masks

    part = replace(
        whole,
        token_ids=whole.token_ids[:5],
        logprobs=whole.logprobs[:5],
        policy_versions=whole.policy_versions[:5],
        sampling_mask=join_masks(split_masks(mask)[:5]),
    )
    again = await engine.generate(
        ask(prompt_of(5), "r", prefix=part, top_k=4, record_sampling_mask=True, **endless(12))
    )
    assert again.token_ids.tolist() == whole.token_ids.tolist()
    assert np.array_equal(again.sampling_mask.token_ids, mask.token_ids)
    assert np.array_equal(again.sampling_mask.offsets, mask.offsets)


async def test_nothing_is_recorded_where_the_whole_vocabulary_was_drawn_from(engine):
    assert (await engine.generate(ask(prompt_of(5), record_sampling_mask=True))).sampling_mask is None
