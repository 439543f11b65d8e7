"""Turns a Hugging Face folder into what every engine needs to know of a model, and into the model itself."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.cores import copy_beside
from headrace.errors import ModelError

_FALLBACK_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """vocab_size, the longest sequence, the model's own end tokens, and its tokenizer where the folder has one.

    mark: digest of its configuration; models of one mark have keys and values of the same form
    """

    vocab_size: int
    context_length: int
    end_ids: tuple[int, ...]
    tokenizer: Any = None
    mark: str = ""


def read_config(folder: str) -> Any:
    """The model's configuration. A fresh object each time: loading a model with it changes it."""
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"model.path: {folder!r} has no config.json; give the folder of a Hugging Face causal LM")
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"model.path: the config.json in {folder!r} cannot be read: {error}") from error


def read_facts(folder: str, context_length: int = 0) -> ModelFacts:
    """`context_length` 0 takes the model's own limit."""
    config = read_config(folder)
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None) or _FALLBACK_CONTEXT
    if context_length > own:
        raise ModelError(f"rollout.engine.context_length: {context_length} is beyond the model's own limit of {own}")
    tokenizer = _tokenizer(folder)
    ends = [*_ids(getattr(text, "eos_token_id", None)), *named_end_ids(Path(folder))]
    ends += _ids(getattr(tokenizer, "eos_token_id", None))
    mark = hashlib.sha256((Path(folder) / "config.json").read_bytes()).hexdigest()
    return ModelFacts(text.vocab_size, context_length or own, tuple(dict.fromkeys(ends)), tokenizer, mark)


def named_end_ids(folder: Path) -> tuple[int, ...]:
    """All end tokens that the model's own files name."""
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ends += _ids(json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id"))
    return tuple(dict.fromkeys(ends))


def load_model(folder: str, dtype: str, attention: str) -> Any:
    """The causal LM in evaluation mode, without gradients, its attention running through the named function."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=read_config(folder), dtype=getattr(torch, dtype), attn_implementation=attention
        )
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"model.path: no causal LM could be loaded from {folder!r}: {error}") from error
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.eval().requires_grad_(False)


class ModelPlan:
    """A model's structure without its memory, from which empty models of its kind are made."""

    def __init__(self, model: Any) -> None:
        import torch

        with torch.device("meta"):
            self._skeleton = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval().requires_grad_(False)
        # Buffers (rotary frequencies) are no weights: nobody publishes them.
        self._buffers = dict(model.named_buffers())

    def empty(self) -> Any:
        """A model whose weights are still to be written."""
        model = copy.deepcopy(self._skeleton).to_empty(device="cpu")
        model.tie_weights()
        for name, buffer in model.named_buffers():
            buffer.copy_(self._buffers[name])
        return model


def check_fit(tensors: Mapping[str, Any], shapes: Mapping[str, Any], may_be_missing: Collection[str] = ()) -> None:
    """Whether published tensors are all those of a model, in its shapes: nothing that reads them may run past their end."""
    missing, unknown = sorted(set(shapes) - set(tensors) - set(may_be_missing)), sorted(set(tensors) - set(shapes))
    if missing or unknown:
        raise ModelError(f"published weights do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}")
    for name, tensor in tensors.items():
        if shapes[name] != tensor.shape:
            raise ModelError(f"published {name} has shape {tuple(tensor.shape)}, the model {tuple(shapes[name])}")


def copy_into(model: Any, tensors: Any) -> None:
    """Write named tensors over a model's own. Tied names may be missing; any other difference is an error."""
    own = model.state_dict()
    tied = {
        name for name in own if any(own[name].data_ptr() == own[given].data_ptr() for given in tensors if given in own)
    }
    check_fit(tensors, {name: tensor.shape for name, tensor in own.items()}, tied)
    for name, tensor in tensors.items():
        copy_beside(own[name], tensor)


def named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a model as they are published: a tied weight once."""
    yield from model.named_parameters()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from ((name, tensor) for name, tensor in model.state_dict().items() if name not in parameters)


def weights_digest(named: Iterable[tuple[str, Any]]) -> str:
    """sha256 over names, types, shapes and bytes, in the order of names: equal for equal weights, whoever holds them."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((Path(folder) / name).is_file() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(f"model.path: the tokenizer in {folder!r} cannot be loaded: {error}") from error


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, (list, tuple)) else [int(value)]
