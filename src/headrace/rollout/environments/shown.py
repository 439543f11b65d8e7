"""Turns what environments show into what a policy sees: images grey and of another size, the last frames together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from headrace.errors import ConfigError
from headrace.policies.spaces import Leaf, Spaces
from headrace.rollout.config import EnvConfig
from headrace.types import Array

Leaves = dict[str, Array]
GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue (ITU-R BT.601)."""


class Shown:
    """`spaces` is what the policy sees. Rows [N, ...] go through `first` after a reset and `step` after a step; `frame`
    is what they do to one row apart from earlier ones.

    Frames are stacked on a new first axis, the oldest first; an episode's first observation stands for those before it
    (as Gymnasium's FrameStackObservation does).
    """

    def __init__(self, spaces: Spaces, config: EnvConfig, *, stack: int) -> None:
        images = {leaf.name: _image(leaf, config) for leaf in spaces.leaves if leaf.kind == "image"}
        if (config.image_size or config.greyscale) and not images:
            key = "image_size" if config.image_size else "greyscale"
            raise ConfigError(f"env.{key}", f"found with {config.id!r}, which shows no image; leave it out")
        self._change = {name: change for name, (_, change) in images.items() if change is not None}
        frames = tuple(images[leaf.name][0] if leaf.name in images else leaf for leaf in spaces.leaves)
        self._stack, self._rows = stack, {}  # leaves [N, stack, ...]
        self.names = [leaf.name for leaf in frames]
        self.spaces = replace(spaces, leaves=tuple(_stacked(leaf, stack) for leaf in frames))

    def frame(self, observations: Leaves) -> Leaves:
        if not self._change:
            return observations
        return {name: self._change[name](leaf) if name in self._change else leaf for name, leaf in observations.items()}

    def first(self, observations: Leaves) -> Leaves:
        """[N, ...] the first observations of all environments."""
        frames = self.frame(observations)
        if self._stack == 1:
            return frames
        self._rows = {name: np.repeat(leaf[:, None], self._stack, 1) for name, leaf in frames.items()}
        return dict(self._rows)

    def step(self, observations: Leaves, begins: Array, ended: Array, final: Leaves) -> tuple[Leaves, Leaves]:
        """What is seen after a step, and the true last of the episodes of `ended` [K], whose rows were reset already.

        begins: [N] rows that are the first of an episode; final: leaves [K, ...]
        """
        frames, last = self.frame(observations), self.frame(final) if final else final
        if self._stack == 1:
            return frames, last
        for name, rows in self._rows.items():
            if len(ended):
                last[name] = np.concatenate([rows[ended, 1:], last[name][:, None]], 1)
            rows[:, :-1] = rows[:, 1:]
            rows[:, -1] = frames[name]
            if begins.any():
                rows[begins] = frames[name][begins, None]
        return dict(self._rows), dict(last)


def _stacked(leaf: Leaf, count: int) -> Leaf:
    if count == 1:
        return leaf
    return replace(leaf, shape=(count, *leaf.shape), sizes=leaf.sizes * count, starts=leaf.starts * count)


def _image(leaf: Leaf, config: EnvConfig) -> tuple[Leaf, Callable[[Array], Array] | None]:
    """How an image is shown, and the function [N, ...] -> [N, ...] that makes it so; None: as it comes."""
    shape = leaf.shape[-3:] if len(leaf.shape) > 2 else (*leaf.shape, 1)
    last = shape[-1] < shape[0]
    (height, width), channels = (shape[:2], shape[2]) if last else (shape[1:], shape[0])
    grey = config.greyscale and channels == 3
    size = tuple(config.image_size) or (height, width)
    if not grey and size == (height, width):
        return leaf, None
    rows, columns = _areas(height, size[0]), _areas(width, size[1])
    flat = len(leaf.shape) == 2

    def change(values: Array) -> Array:
        planes = values[..., None] if flat else values
        planes = np.moveaxis(planes, -1, -3) if last else planes  # [..., C, H, W]
        floats = planes.astype(np.float32)
        if grey:
            floats = np.tensordot(floats, GREY, ((-3,), (0,)))[..., None, :, :]
        floats = rows @ floats @ columns.T
        made = np.rint(floats).astype(leaf.dtype) if leaf.dtype == "uint8" else floats.astype(leaf.dtype)
        made = np.moveaxis(made, -3, -1) if last else made
        return made[..., 0] if flat else made

    sides = (*size, 1 if grey else channels) if last else (1 if grey else channels, *size)
    return replace(leaf, shape=size if flat else (*leaf.shape[:-3], *sides)), change


def _areas(given: int, wanted: int) -> Array:
    """[wanted, given] the share of each given pixel in each wanted one: the mean over its area."""
    edges = np.linspace(0, given, wanted + 1)
    inside = np.minimum(edges[1:, None], np.arange(1, given + 1)) - np.maximum(edges[:-1, None], np.arange(given))
    return (inside.clip(0) * (wanted / given)).astype(np.float32)
