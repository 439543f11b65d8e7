"""Turns rows of metrics into TensorBoard scalars in the run folder's `tensorboard/`."""

from __future__ import annotations

import math
from pathlib import Path

from headrace.errors import MissingExtra


class TensorBoardSink:
    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "the sink 'tensorboard'") from error
        self._summary = Summary
        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)

    def write(self, step: int, values: dict[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        row = [self._summary.Value(tag=name, simple_value=value) for name, value in finite.items()]
        # One record for all of them: `add_scalar` makes one for each.
        self._writer.file_writer.add_summary(self._summary(value=row), step)

    def close(self) -> None:
        self._writer.close()
