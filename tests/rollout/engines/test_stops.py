"""How generations end: several end tokens, stop strings over token borders, minimum and maximum lengths."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.errors import RequestRefused
from rollout.engines.engine_models import END, VOCAB, ask, build_engine, char_tokenizer, endless, folder_of, prompt_of

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


async def test_min_tokens_holds_every_end_token_and_every_stop_string_back(engine):
    """The model's own end token, two more that the request names, and a string that nearly every text contains."""
    ends = (END, *range(40, 70))
    requests = [
        ask(prompt_of(4, i), f"m{i}", member=i, max_tokens=40, min_tokens=12, stop_token_ids=ends[1:]) for i in range(6)
    ]
    for one in await asyncio.gather(*map(engine.generate, requests)):
        assert not set(one.token_ids[:12].tolist()) & set(ends) and 12 < one.token_ids.size < 40
        assert one.finish_reason == "stop" and one.matched_stop == one.token_ids[-1] and one.matched_stop in ends
    any_character = tuple(chr(32 + i) for i in range(95))
    got = await engine.generate(ask(prompt_of(4), "s", max_tokens=40, min_tokens=12, stop=any_character))
    assert got.token_ids.size == 13 and got.matched_stop == text_of(got)[-1]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stop_string_may_end_inside_a_token_and_begin_inside_a_character(kind, tmp_path):
    """A tokenizer of bytes and pieces: `é` takes two tokens, and one token holds "ab cd"."""
    from shutil import copytree

    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from headrace.exchange.channels.in_process import InProcessChannel

    folder = tmp_path / "model"
    copytree(folder_of(), folder)
    # Byte-level names of the two bytes of é are Ã and ©.
    vocabulary = {"<s>": 0, "<end>": END, "Ã": 2, "©": 3, "abĠcd": 4, "xy": 5, **{f"<{i}>": i for i in range(6, VOCAB)}}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    plain.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>").save_pretrained(folder)
    channel = InProcessChannel()
    engine = build_engine(kind, str(folder), channel=channel)
    await engine.commit(channel.publish(walking([2, 3, 4, 5]), 1))
    for name, stop, count in (
        ("é", "é", 2),
        ("ab", "b c", 3),
        ("over", "éab", 3),
        ("two", "cdx", 4),
        ("none", "éx", 16),
    ):
        got = await engine.generate(ask([7], name, temperature=0.0, max_tokens=16, stop=(stop,)))
        assert got.token_ids.tolist()[:4] == [2, 3, 4, 5][: min(count, 4)] and got.token_ids.size == count
        assert got.matched_stop == (None if name == "none" else stop)
    await engine.close()


def walking(order):
    """Weights under which greedy decoding goes round through the tokens of a list, and starts with the first."""
    import torch

    from rollout.engines.engine_models import reference

    tensors = {name: tensor.clone() for name, tensor in reference().state_dict().items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1.0)
    # Each token shows a direction of its own, and the head answers a token's direction with the next one.
    embedding, head = tensors["model.embed_tokens.weight"].zero_(), tensors["lm_head.weight"].zero_()
    torch.nn.init.eye_(embedding[:32])
    for token in range(32):
        after = order[(order.index(token) + 1) % len(order)] if token in order else order[0]
        head[after, token] = 5.0
    return list(tensors.items())


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


async def test_only_tokens_under_a_minimum_are_recorded_where_nothing_else_is_ruled_out(engine):
    got = await engine.generate(ask(prompt_of(5), record_sampling_mask=True, max_tokens=8, min_tokens=3))
    lengths = np.diff(got.sampling_mask.offsets).tolist()
    assert lengths[:3] == [VOCAB - 1] * 3 and set(lengths[3:]) == {0}


async def test_allowed_ids_are_the_only_ones_that_come(engine):
    allowed = (5, 9, 30, 31)
    got = await engine.generate(ask(prompt_of(5), record_sampling_mask=True, max_tokens=40, allowed_token_ids=allowed))
    assert set(got.token_ids.tolist()) == set(allowed) and got.token_ids.size == 40
    assert got.sampling_mask.token_ids.tolist() == list(allowed) * 40


async def test_a_strong_penalty_lets_no_token_come_twice(engine):
    """Greedy with logits moved far below all others once they were seen."""
    options = dict(temperature=0.0, repetition_penalty=1e9, logit_bias=tuple((i, 50.0) for i in range(VOCAB)))
    got = await engine.generate(ask([5], max_tokens=30, **options))
    plain = await engine.generate(ask([5], max_tokens=30, temperature=0.0))
    assert len(set(got.token_ids.tolist())) > len(set(plain.token_ids.tolist()))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (dict(allowed_token_ids=(VOCAB,)), "names token"),
        (dict(logit_bias=((-2, 1.0),)), "names token"),
        (dict(allowed_token_ids=(1,), min_tokens=2), "end tokens only"),
        (dict(repetition_penalty=0.0), "above 0"),
    ],
)
async def test_sampling_that_cannot_be_is_refused(engine, options, word):
    with pytest.raises(RequestRefused, match=word):
        await engine.generate(ask(prompt_of(4), **options))
