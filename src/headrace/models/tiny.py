"""Turns a seed into a character-level decoder that adds two-digit numbers right about two times in five.

It needs no download and seconds of one core, yet everything about it is a real model: a Hugging Face folder with
safetensors, a tokenizer and an end token. It is what the tests train.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.models.cache import cached_folder
from headrace.rollout.sources.arithmetic import sums_problems

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]

END, UNKNOWN = "<end>", "<unk>"
VOCABULARY = (END, UNKNOWN, *"0123456789", "+", "=", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Shape and warm-up. The warm-up ends when a sampled answer to a training problem is right with probability `target`."""

    revision: int = 4
    layers: int = 2
    width: int = 192
    heads: int = 12
    mlp_width: int = 576
    context: int = 128
    rope_theta: float = 30.0
    """Prompts have nine positions: slower rotations than this would tell them apart by nothing."""
    initial_std: float = 0.06
    """Three times the usual: with it and the rotations, learning to add takes a third of the steps."""
    batch: int = 128
    lr: float = 2e-3
    ramp_steps: int = 50
    max_steps: int = 4000
    target: float = 0.44
    check_every: int = 5


RECIPE = Recipe()


def tiny_folder(seed: int, progress: Progress) -> Path:
    """The warmed-up model of this seed, built once and cached under its recipe's hash."""
    recipe = hashlib.sha256(json.dumps(asdict(RECIPE), sort_keys=True).encode()).hexdigest()[:10]

    def build(folder: Path) -> None:
        progress(f"tiny: warming up a character-level decoder on two-digit sums (seed {seed}, once, then cached)")
        make_tiny(folder, seed, progress=progress)

    def wait() -> None:
        progress("tiny: another process is warming up the same model; waiting for it")

    return cached_folder(f"tiny-{recipe}-seed{seed}", build, on_wait=wait)


def make_tiny(
    folder: Path, seed: int, *, warmup_steps: int | None = None, progress: Progress = lambda line: None
) -> None:
    """Save a model and its tokenizer in `folder`. `warmup_steps` 0 leaves it untrained; None trains to the target.

    Neither torch's global random state nor its thread count is changed afterwards.
    """
    import torch
    from transformers import LlamaForCausalLM

    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_model_config()).float()
        if warmup_steps != 0:
            _warm_up(model, seed, warmup_steps, progress)
    end = VOCABULARY.index(END)
    model.generation_config.update(eos_token_id=end, pad_token_id=end, bos_token_id=None, do_sample=True)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_tokenizer() -> Any:
    """One token a character; anything outside the vocabulary is one unknown token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        model_max_length=RECIPE.context,
        clean_up_tokenization_spaces=False,
    )


def _model_config() -> Any:
    from transformers import LlamaConfig

    end = VOCABULARY.index(END)
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=RECIPE.width,
        intermediate_size=RECIPE.mlp_width,
        num_hidden_layers=RECIPE.layers,
        num_attention_heads=RECIPE.heads,
        num_key_value_heads=RECIPE.heads,
        rope_parameters={"rope_type": "default", "rope_theta": RECIPE.rope_theta},
        initializer_range=RECIPE.initial_std,
        max_position_embeddings=RECIPE.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )


def _warm_up(model: Any, seed: int, steps: int | None, progress: Progress) -> None:
    """Teach answers (never questions) to training problems alone."""
    import torch

    ids, targets = _examples()
    draw = torch.Generator().manual_seed(seed)
    probe = torch.randperm(len(ids), generator=draw)[:512]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE.lr, weight_decay=0.0)
    limit = RECIPE.max_steps if steps is None else steps
    for step in range(1, limit + 1):
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.lr * min(1.0, step / RECIPE.ramp_steps)
        rows = torch.randint(len(ids), (RECIPE.batch,), generator=draw)
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=ids[rows]).logits.flatten(0, 1), targets[rows].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % RECIPE.check_every == 0 or step == limit:
            accuracy = answer_probability(model, ids[probe], targets[probe])
            reached = steps is None and accuracy >= RECIPE.target
            if step % (10 * RECIPE.check_every) == 0 or step == limit or reached:
                progress(f"tiny: warm-up step {step}: loss {loss.item():.3f}, sampled accuracy {accuracy:.2f}")
            if reached:
                return


def _examples() -> tuple[torch.Tensor, torch.Tensor]:
    """[N, 9] input ids and [N, 9] next-token targets, -100 over the question and after the end token."""
    return encode_sums(sums_problems(heldout=False))


def encode_sums(problems: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_examples`, for any ordered pairs of two-digit numbers."""
    import torch

    index = {token: i for i, token in enumerate(VOCABULARY)}
    width = len("99+99=198")
    ids = torch.full((len(problems), width), index[END])
    targets = torch.full((len(problems), width), -100)
    for row, (a, b) in enumerate(problems):
        question, answer = f"{a}+{b}=", [index[char] for char in str(a + b)]
        tokens = [index[char] for char in question] + answer + [index[END]]
        ids[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        first = len(question) - 1
        targets[row, first : first + len(answer) + 1] = torch.tensor(tokens[len(question) :])
    return ids, targets


def answer_probability(model: Any, ids: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean probability that sampling at temperature 1 gives the right answer and ends: exact, nothing is sampled."""
    import torch

    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits.float(), -1)
    wanted = targets >= 0
    each = logprobs.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1).where(wanted, 0.0)
    return each.sum(-1).exp().mean().item()


@contextmanager
def _one_thread():
    """On a model this small one thread is faster than two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
