"""Turns a causal LM into one of which only low-rank adapters are trained, and the adapters into what is published and saved.

Hu et al. 2021, "LoRA": W x + (alpha / rank) B A x, with A [rank, in] random and B [out, rank] zero at the start. The base
weights never change, so the model with its adapters switched off is the reference, and merging makes copies of them.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError, MissingExtra, RunDirError
from headrace.training import checkpoint_folder
from headrace.training.config import LoraConfig
from headrace.training.policy import Policy
from headrace.training.whole_model import named_weights
from headrace.types import Scope

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_ADAPTER = "default"
_BASE = ".base_layer"
"""What `peft` puts into the names of weights that have an adapter."""


class Adapters:
    """Adapters put into a model, in place: they are trained, the base under them is not."""

    def __init__(self, model: Any, folder: Path, config: LoraConfig) -> None:
        self._model, self._folder, self._config = model, folder, config
        self._peft = attach(model, config)
        self.scope: Scope = "adapter" if config.kind == "adapter" else "full"

    @contextmanager
    def reference(self, policy: Policy) -> Iterator[Policy]:
        """The policy at the start: the base without adapters, in the same memory."""
        with self._peft.disable_adapter():
            yield policy

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is published: the adapters alone, or all weights with them added."""
        return self._factors() if self._config.kind == "adapter" else self._merged()

    def _factors(self) -> Iterator[tuple[str, Tensor]]:
        """`LAYER.lora_A` [rank, in] and `LAYER.lora_B` [out, rank]; alpha / rank is in B, so that receivers need no config."""
        for name, layer in adapted_layers(self._model):
            yield f"{name}.lora_A", layer.lora_A[_ADAPTER].weight.detach()
            yield f"{name}.lora_B", layer.lora_B[_ADAPTER].weight.detach() * layer.scaling[_ADAPTER]

    @torch.no_grad()
    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under their Hugging Face names. Adapted ones are fresh: adding to the base and taking away again would
        leave it a little different each time."""
        layers = dict(adapted_layers(self._model))
        for name, tensor in named_weights(self._model):
            layer, _, kind = name.partition(f"{_BASE}.")
            if kind == "weight":
                delta = layers[layer].get_delta_weight(_ADAPTER)
                yield f"{layer}.weight", (tensor + delta).to(tensor.dtype)
            elif ".lora_" not in name:
                yield name.replace(_BASE, ""), tensor

    # ------------------------------------------------------------------------------------------------ checkpoints

    def save(self, folder: Path) -> dict[str, Any]:
        """Write a plain PEFT adapter folder, which names its base; returns facts that `load` gets back."""
        from safetensors.torch import save_file

        self._peft.peft_config[_ADAPTER].save_pretrained(folder)
        save_file({name: p.detach().cpu().contiguous() for name, p in self._saved_names().items()}, folder / WEIGHTS)
        checkpoint_folder.copy_companions(self._folder, folder, leave=("config.json", "generation_config.json"))
        return {"base": self._base_hash}

    def load(self, folder: Path, facts: dict[str, Any]) -> None:
        """Take the adapters over from such a folder, in place."""
        from safetensors.torch import load_file

        if facts.get("base") != self._base_hash:
            raise RunDirError(f"{folder} holds adapters of another model than {self._folder}; set model.path to theirs")
        alpha = json.loads((folder / CONFIG).read_text())["lora_alpha"]
        if alpha != self._config.alpha:
            raise RunDirError(f"{folder} holds adapters of alpha {alpha}; training.lora.alpha is {self._config.alpha}")
        saved, own = load_file(folder / WEIGHTS), self._saved_names()
        if differing := sorted(set(saved) ^ set(own)):
            raise RunDirError(f"{folder} has adapters on other layers than training.lora says, as {differing[0]}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])

    def _saved_names(self) -> dict[str, Tensor]:
        """The adapters' tensors by the names under which `peft` saves them."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self._peft, save_embedding_layers=False)

    @cached_property
    def _base_hash(self) -> str:
        files = sorted(path for path in self._folder.iterdir() if path.name.endswith(checkpoint_folder.WEIGHT_SUFFIXES))
        hashes = [f"{path.name} {checkpoint_folder.file_hash(path)}" for path in files]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def attach(model: nn.Module, config: LoraConfig) -> Any:
    """Put adapters into the model, in place, as the only weights that are trained. Returns `peft`'s handle to them.

    All runs of one shape begin with the same adapters: nothing is drawn from the caller's random state.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft", "lora", "training.lora.kind") from error
    targets = _targets(model, config.target_modules)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(0)
        warnings.simplefilter("ignore")  # peft asks transformers by an old name
        return peft.get_peft_model(model, settings)


def _targets(model: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    """Last parts of the names of the linear layers that get an adapter."""
    head = model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    there = sorted({name.rpartition(".")[2] for name in linear})
    for index, name in enumerate(wanted):
        if name not in there:
            raise ConfigError(
                f"training.lora.target_modules.{index}",
                f'found "{name}", but the linear layers of {type(model).__name__} are {", ".join(there)}',
            )
    return list(wanted) or there


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of what has an adapter."""
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            yield name, layer
