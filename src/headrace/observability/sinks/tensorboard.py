"""Turns rows of metrics into TensorBoard scalars in the run folder's `tensorboard/`."""

from __future__ import annotations

import math
from pathlib import Path

from headrace.errors import MissingExtra


class TensorBoardSink:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "the sink 'tensorboard'") from error
        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
