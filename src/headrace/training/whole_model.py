"""Turns all weights of a model into what is trained, published and saved; the reference is a second model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import ConfigError
from headrace.training import checkpoint_folder
from headrace.training.policy import Policy, dtype_name, load_model
from headrace.types import Scope


class WholeModel:
    """What training changes is the model itself. `reference`: the frozen policy of the KL term, None without one."""

    scope: Scope = "full"

    def __init__(self, model: Any, folder: Path, reference: Policy | None) -> None:
        self._model, self._folder, self._reference = model, folder, reference

    @contextmanager
    def reference(self, policy: Policy) -> Iterator[Policy]:
        """The policy at the start."""
        if self._reference is None:
            raise ConfigError(
                "training.loss.kl_coef", "0 keeps no reference model, but its log-probabilities are asked for"
            )
        yield self._reference

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is published: Hugging Face names; a tied weight once, under its first name."""
        return named_weights(self._model)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write a plain Hugging Face folder; returns facts that `load` gets back."""
        self._model.save_pretrained(folder)
        checkpoint_folder.copy_companions(self._folder, folder)
        return {}

    def load(self, folder: Path, facts: dict[str, Any]) -> None:
        """Take the weights over from such a folder, in place."""
        saved = load_model(str(folder), dtype_name(self._model.dtype), "cpu", check=False)
        with torch.no_grad():
            self._model.load_state_dict(saved.state_dict())


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, a tied one once under its first name, then buffers that are saved with the model."""
    yield from ((name, p.detach()) for name, p in model.named_parameters())
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from ((name, t) for name, t in model.state_dict().items() if name not in parameters)
