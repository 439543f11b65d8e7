"""Turns packed micro-batches into new weights on one device: forward, backward, AdamW, publish, save."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, RunDirError
from headrace.protocols import Annotation, WeightChannel, WorkerContext
from headrace.training import checkpoint_folder
from headrace.training.config import TrainingConfig
from headrace.training.lora import Adapters
from headrace.training.losses import LossInputs, loss_function
from headrace.training.optimizer import FlatAdamW, FlatParameters
from headrace.training.policy import Policy, load_model
from headrace.training.whole_model import WholeModel
from headrace.types import Event, Metrics, Stat, TokenBatch, WeightTicket


def build_single_device(
    context: WorkerContext,
    config: TrainingConfig,
    model_folder: str,
    dtype: str = "float32",
    channel: WeightChannel | None = None,
    max_length: int = 0,
) -> SingleDevice:
    """Load the model and hold it for training. `max_length` is known to the batches already; it is kept for the record."""
    if context.resources.threads:
        torch.set_num_threads(context.resources.threads)
    return SingleDevice(context, config, model_folder, dtype, channel)


class SingleDevice:
    """A policy, its optimiser and, when there is a KL term, its frozen reference. Torch runs inside the calls."""

    def __init__(
        self,
        context: WorkerContext,
        config: TrainingConfig,
        model_folder: str,
        dtype: str,
        channel: WeightChannel | None,
        device: str = "cpu",
    ) -> None:
        self._context, self._config, self._channel = context, config, channel
        self._model_folder = Path(model_folder)
        model = load_model(model_folder, dtype, device)
        self._trained: WholeModel | Adapters
        if config.lora.kind != "off":
            self._trained = Adapters(model, self._model_folder, config.lora)
        else:
            self._trained = WholeModel(model, self._model_folder, self._frozen(dtype, device))
        self._flat = FlatParameters(model)
        self._policy = Policy(
            model, logits_chunk=config.logits_chunk, gradient_checkpointing=config.gradient_checkpointing
        )
        total = config.steps * config.epochs * config.minibatches
        self._optimizer = FlatAdamW(self._flat, config.optimizer, total)
        self._loss = loss_function(config)
        self._version = -1
        self._offloaded: tempfile.TemporaryDirectory[str] | None = None

    def _frozen(self, dtype: str, device: str) -> Policy | None:
        """A copy of the model at the start, for the KL term."""
        if self._config.loss.kl_coef == 0:
            return None
        model = load_model(str(self._model_folder), dtype, device, check=False).requires_grad_(False)
        return Policy(model, logits_chunk=self._config.logits_chunk)

    # --------------------------------------------------------------------------------------------------- training

    async def annotate(self, batch: TokenBatch, what: Sequence[Annotation]) -> TokenBatch:
        """Fill reference_logprobs [M] and proximal_logprobs [M]."""
        found: dict[str, np.ndarray] = {}
        with self._event("annotate"), torch.no_grad():
            for name in what:
                if name == "values":
                    raise ConfigError(
                        "training.backend", "single_device has no value function: 'values' cannot be annotated"
                    )
                own = nullcontext(self._policy)
                with self._trained.reference(self._policy) if name == "reference" else own as policy:
                    logprobs, _ = policy.logprobs(batch, entropy=False)
                found[f"{name}_logprobs"] = logprobs.cpu().numpy()
        return dataclasses.replace(batch, **found)

    async def forward_backward(self, batch: TokenBatch) -> Metrics:
        """Add the gradient of this micro-batch's share of the loss."""
        if len(batch.target_ids) == 0:
            return {"batch/empty_micro": Stat(1.0, 1.0)}
        with self._event("forward_backward"):
            logprobs, entropies = self._policy.logprobs(batch)
            output = self._loss(self._loss_inputs(batch, logprobs, entropies))
            output.loss.backward()
        return output.metrics

    def _loss_inputs(self, batch: TokenBatch, logprobs: Tensor, entropies: Tensor | None) -> LossInputs:
        device = logprobs.device

        def tensor(array: np.ndarray | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return None if array is None else torch.from_numpy(np.array(array)).to(device, dtype)

        return LossInputs(
            logprobs=logprobs,
            behavior_logprobs=tensor(batch.behavior_logprobs),
            advantages=tensor(batch.advantages),
            samples=tensor(batch.target_samples, torch.int64),
            sample_weights=tensor(batch.sample_weights),
            versions=tensor(batch.target_versions, torch.int64),
            counts=batch.counts,
            config=self._config,
            proximal_logprobs=tensor(batch.proximal_logprobs),
            reference_logprobs=tensor(batch.reference_logprobs),
            entropies=entropies,
            lags=tensor(batch.target_lags, torch.int64),
        )

    async def optimizer_step(self, gradient_scale: float = 1.0) -> Metrics:
        """Multiply the gradient by `gradient_scale`, clip, step, advance the schedule, clear the gradients."""
        with self._event("optimizer_step"):
            if gradient_scale != 1.0:
                self._flat.grads.mul_(gradient_scale)
            norm, rate, stepped = self._optimizer.step()
        metrics = {"optimizer/lr": Stat(rate), "optimizer/skipped": Stat(0.0 if stepped else 1.0)}
        if stepped:
            metrics["optimizer/grad_norm"] = Stat(norm, 1.0, norm)
        return metrics

    # ---------------------------------------------------------------------------------------------------- weights

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is published."""
        return self._trained.tensors()

    async def publish(self, version: int) -> WeightTicket:
        """Send the weights through the channel as `version`."""
        if self._channel is None:
            raise ConfigError("weights.channel", "this trainer was built without a channel: it cannot publish")
        with self._event("publish", version):
            ticket = self._channel.publish(self.named_tensors(), version, scope=self._trained.scope)
        self._version = version
        return ticket

    async def republish(self) -> WeightTicket:
        """The last version again, whole: for a receiver that has no base for what changed."""
        return self._channel.whole()  # type: ignore[union-attr]

    async def offload(self) -> None:
        """Leave the device to others: gradients are freed, the optimiser's moments moved away. The weights stay."""
        if self._offloaded is None:
            self._offloaded = tempfile.TemporaryDirectory(prefix="headrace-offload-")
            self._flat.release_grads()
            self._optimizer.offload(Path(self._offloaded.name))

    async def onload(self) -> None:
        """Be ready to train again."""
        if self._offloaded is not None:
            self._optimizer.onload()
            self._flat.allocate_grads()
            self._offloaded.cleanup()
            self._offloaded = None

    async def fingerprint(self) -> str:
        """sha256 over all trained weights."""
        values = self._flat.values.detach().cpu().contiguous()
        return hashlib.sha256(values.view(torch.uint8).numpy()).hexdigest()

    # ------------------------------------------------------------------------------------------------ checkpoints

    async def save(self, folder: str) -> None:
        """Write the folder whole or not at all: weights, tokenizer, optimiser, schedule, random state, manifest."""
        away = self._offloaded is not None
        await self.onload()
        with self._event("save"):
            checkpoint_folder.write_folder(folder, self._fill)
        if away:
            await self.offload()

    def _fill(self, folder: Path) -> None:
        from safetensors.torch import save_file

        facts = self._trained.save(folder)
        state = {**self._optimizer.state(), "torch_rng": torch.get_rng_state()}
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in state.items()}, folder / checkpoint_folder.OPTIMIZER
        )
        facts |= {"format": 1, "attempts": self._optimizer.attempts, "parameters": self._flat.values.numel()}
        (folder / checkpoint_folder.TRAINER).write_text(json.dumps(facts, indent=1))

    async def load(self, folder: str, weights_only: bool = False) -> None:
        """Go on from a folder that `save` wrote; or take no more than the weights, of any folder of this model."""
        from safetensors.torch import load_file

        await self.onload()
        state = Path(folder) / checkpoint_folder.TRAINER
        if weights_only:
            self._trained.load(Path(folder), json.loads(state.read_text()) if state.is_file() else {})
            self._flat.load()
            return
        checkpoint_folder.verify_folder(folder)
        facts = json.loads(state.read_text())
        if facts["parameters"] != self._flat.values.numel():
            raise RunDirError(
                f"{folder} holds {facts['parameters']} trained weights, this run has {self._flat.values.numel()}"
            )
        self._trained.load(Path(folder), facts)
        self._flat.load()
        saved = load_file(Path(folder) / checkpoint_folder.OPTIMIZER)
        torch.set_rng_state(saved.pop("torch_rng"))
        self._optimizer.restore(saved, facts["attempts"])

    async def close(self) -> None:
        if self._offloaded is not None:
            self._offloaded.cleanup()

    # ----------------------------------------------------------------------------------------------------- events

    @contextmanager
    def _event(self, kind: str, version: int | None = None) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._context.record(
                Event(
                    start,
                    self._context.name,
                    kind,
                    version=self._version if version is None else version,
                    duration_ns=time.monotonic_ns() - start,
                )
            )
