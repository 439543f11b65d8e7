"""Turns a task into the prompt's tokens, and ends the episode after one answer."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from headrace.errors import DataError
from headrace.protocols import Turn
from headrace.rollout.config import TasksConfig
from headrace.types import Generation, Task

REMEMBERED = 1024
"""Prompts whose tokens are kept: more than the tasks that a batch has in flight."""


class SingleTurn:
    """One prompt, one answer. Holds no state of an episode, so one object may serve any number of them.

    A string prompt is tokenised as it stands, with what the tokenizer itself puts *before* raw text (usually a
    begin-of-text token) and nothing after it: a prompt that ends with an end token would ask for nothing. A list of
    chat messages goes through the chat template, opened for the assistant's answer; a last message by the assistant
    is continued. The prefill stands at the end of the text *before* tokenising, so that it joins as the model
    expects; sampled tokens are never tokenised again.

    end_token_ids: the ids that end a generation beside the tokenizer's own end token; `decode` leaves them out
    """

    def __init__(self, tokenizer: Any, config: TasksConfig, *, end_token_ids: Iterable[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.config = config
        ends = {*end_token_ids, tokenizer.eos_token_id}
        self.end_token_ids = frozenset(end for end in ends if end is not None)
        self.encode, self._decode = _plain_codec(tokenizer)
        self._before: list[int] | None = None
        """What the tokenizer puts before raw text, whatever the text: found with the first one."""
        self._rendered: OrderedDict[str, tuple[Task, list[int]]] = OrderedDict()

    async def reset(self, task: Task) -> Turn:
        return Turn(prompt_ids=self.render(task))

    async def step(self, generation: Generation) -> Turn:
        return Turn(done=True)

    async def close(self) -> None:
        pass

    def render(self, task: Task) -> list[int]:
        """[P] the prompt's token ids. Siblings ask for the same task at the same time, so the last ones are remembered."""
        known = self._rendered.get(task.task_id)
        if known is not None and known[0] is task:
            return known[1]
        text, is_chat = self._text(task)
        ids = self.encode(text) if is_chat else self.raw_ids(text)
        if not ids:
            raise DataError(f"task {task.task_id}: the prompt {text!r:.60} has no tokens")
        self._rendered[task.task_id] = (task, ids)
        if len(self._rendered) > REMEMBERED:
            self._rendered.popitem(last=False)
        return ids

    def prompt_text(self, task: Task) -> str:
        """The text that `render` tokenises: chat template and prefill included, begin-of-text token not."""
        return self._text(task)[0]

    def prompt_length(self, task: Task) -> int:
        """Tokens of the prompt."""
        return len(self.render(task))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled ids: one end token at the end is left out, and so are special tokens anywhere."""
        ids = np.asarray(token_ids).tolist()
        if ids and ids[-1] in self.end_token_ids:
            ids.pop()
        return self._decode(ids)

    def _text(self, task: Task) -> tuple[str, bool]:
        prompt = task.payload["prompt"]
        prefill = self.config.prefill or task.payload.get("prefill") or ""
        if isinstance(prompt, str):
            if self.config.chat != "always":
                return prompt + prefill, False
            system = [{"role": "system", "content": self.config.system}] if self.config.system else []
            prompt = [*system, {"role": "user", "content": prompt}]
        elif self.config.chat == "never":
            raise DataError(f"task {task.task_id}: the prompt is a list of messages, but tasks.chat = 'never'")
        return self._templated(prompt, task) + prefill, True

    def _templated(self, messages: Sequence[dict[str, Any]], task: Task) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(
                f"task {task.task_id} needs a chat template and the model has none: "
                "use string prompts with tasks.chat = 'auto', or a model tuned for chat"
            )
        goes_on = messages[-1]["role"] == "assistant"
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
            )
        except Exception as error:  # templates are programs that come with a model, and raise what they like
            raise DataError(f"task {task.task_id}: the chat template refused the messages: {error}") from error

    def raw_ids(self, text: str) -> list[int]:
        plain = self.encode(text)
        if plain and plain[0] == self.tokenizer.bos_token_id:
            return plain
        if self._before is None:
            full = list(self.tokenizer(text)["input_ids"])
            places = range(len(full) - len(plain) + 1)
            self._before = next((full[:at] for at in places if full[at : at + len(plain)] == plain), [])
        return self._before + plain


def _plain_codec(tokenizer: Any) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """(text to ids, ids to text), neither with special tokens nor with spaces cleaned up. From the compiled tokenizer itself
    where there is one: transformers' way to it costs ten times what a short text does."""
    from transformers import PreTrainedTokenizerFast

    own = type(tokenizer)
    compiled = isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(own, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("__call__", "_encode_plus", "decode", "_decode")
    )
    if compiled:
        backend = copy.deepcopy(tokenizer.backend_tokenizer)  # on which other callers' limits and padding stay
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
        return (
            lambda text: backend.encode(text, add_special_tokens=False).ids,
            lambda ids: backend.decode(ids, skip_special_tokens=True),
        )
    return (
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
    )
