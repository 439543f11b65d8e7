"""Prompts to tokens and tokens to text: raw strings, chat, prefill, special tokens."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import DataError
from headrace.rollout.config import TasksConfig
from headrace.rollout.environments.single_turn import SingleTurn
from headrace.types import Generation, SamplingParams, Task

SPECIAL = ("<bos>", "<eos>", "<turn>", "<end_of_turn>")
TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}<end_of_turn>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)


def make_tokenizer(*, template: str | None = TEMPLATE, frame: str | None = "<bos> $A"):
    """One token a character; `frame` is what the tokenizer puts around raw text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=frame, special_tokens=[(token, vocabulary[token]) for token in SPECIAL[:2]]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )


def task(prompt, **columns) -> Task:
    return Task(task_id="t", source="s", payload={"prompt": prompt, **columns})


def shown(environment: SingleTurn, prompt, **columns) -> str:
    return environment.tokenizer.decode(environment.render(task(prompt, **columns)), skip_special_tokens=False)


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("frame", ["<bos> $A", "<bos> $A <eos>"])
def test_raw_text_gets_what_the_tokenizer_puts_before_it_and_nothing_after(frame) -> None:
    assert shown(SingleTurn(make_tokenizer(frame=frame), TasksConfig()), "a b") == "<bos>a b"


def test_raw_text_without_a_begin_token() -> None:
    assert shown(SingleTurn(make_tokenizer(frame=None), TasksConfig()), "a b") == "a b"
    assert shown(SingleTurn(make_tokenizer(frame="$A <eos>"), TasksConfig()), "a b") == "a b"


def test_a_begin_token_written_in_the_text_is_not_doubled() -> None:
    assert shown(SingleTurn(make_tokenizer(), TasksConfig()), "<bos>a") == "<bos>a"


def test_messages_go_through_the_template_once_and_open_the_answer() -> None:
    expected = "<bos><turn>user:hi<end_of_turn><turn>assistant:"
    environment = SingleTurn(make_tokenizer(), TasksConfig())
    assert shown(environment, MESSAGES) == expected == environment.prompt_text(task(MESSAGES))


def test_prefill_of_the_config_goes_before_that_of_the_task() -> None:
    opened = "<bos><turn>user:hi<end_of_turn><turn>assistant:"
    assert shown(SingleTurn(make_tokenizer(), TasksConfig(prefill="So")), MESSAGES, prefill="It") == opened + "So"
    assert shown(SingleTurn(make_tokenizer(), TasksConfig()), MESSAGES, prefill="It") == opened + "It"
    assert shown(SingleTurn(make_tokenizer(), TasksConfig()), "q:", prefill="It") == "<bos>q:It"


def test_a_last_message_by_the_assistant_is_continued() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    expected = "<bos><turn>user:hi<end_of_turn><turn>assistant:It is"
    assert shown(SingleTurn(make_tokenizer(), TasksConfig()), messages) == expected


def test_chat_always_wraps_strings_with_the_system_message() -> None:
    environment = SingleTurn(make_tokenizer(), TasksConfig(chat="always", system="be brief"))
    expected = "<bos><turn>system:be brief<end_of_turn><turn>user:hi<end_of_turn><turn>assistant:"
    assert shown(environment, "hi") == expected


def test_chat_that_cannot_be_rendered_is_one_line() -> None:
    with pytest.raises(DataError, match="chat template"):
        SingleTurn(make_tokenizer(template=None), TasksConfig()).render(task(MESSAGES))
    with pytest.raises(DataError, match=r"tasks\.chat"):
        SingleTurn(make_tokenizer(), TasksConfig(chat="never")).render(task(MESSAGES))
    picky = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        SingleTurn(make_tokenizer(template=picky), TasksConfig()).render(task(MESSAGES))


def test_decode_leaves_out_the_end_token_that_ended_it_whichever_it_was() -> None:
    tokenizer = make_tokenizer()
    environment = SingleTurn(
        tokenizer, TasksConfig(), end_token_ids=(tokenizer.convert_tokens_to_ids("<end_of_turn>"),)
    )
    ids = tokenizer("4 2", add_special_tokens=False)["input_ids"]
    for end in ([], [1], [3]):
        assert environment.decode(np.array(ids + end, dtype=np.int32)) == "4 2"
    assert environment.decode([]) == ""
    assert environment.decode([1]) == ""


def test_decode_leaves_out_an_end_token_that_is_an_ordinary_one() -> None:
    tokenizer = make_tokenizer()
    newline = tokenizer.convert_tokens_to_ids("\n")
    environment = SingleTurn(tokenizer, TasksConfig(), end_token_ids=(newline,))
    assert environment.decode([*tokenizer("a", add_special_tokens=False)["input_ids"], newline]) == "a"


async def test_one_answer_ends_the_episode() -> None:
    environment = SingleTurn(make_tokenizer(), TasksConfig())
    turn = await environment.reset(task("hi"))
    assert list(turn.prompt_ids) == environment.render(task("hi")) and not turn.done
    assert environment.prompt_length(task("hi")) == 3
    generation = Generation(
        token_ids=np.array([5]),
        logprobs=np.array([-1.0]),
        policy_versions=np.array([0]),
        finish_reason="stop",
        sampling=SamplingParams(),
    )
    answered = await environment.step(generation)
    assert answered.done and not list(answered.prompt_ids)
    await environment.close()


@pytest.mark.parametrize("limits", [{"truncation": True, "max_length": 2}, {"padding": "max_length", "max_length": 6}])
def test_limits_that_others_set_on_the_tokenizer_are_not_the_prompts(limits):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    environment = SingleTurn(tokenizer, TasksConfig())
    expected = list(tokenizer("a b a b", add_special_tokens=False)["input_ids"])
    tokenizer("a b a b", **limits)
    assert environment.encode("a b a b") == expected and len(expected) > 2
    assert environment.decode(expected) == tokenizer.decode(expected, skip_special_tokens=True)
