"""Turns MJX (JAX) and MuJoCo-Warp into the physics under half-cheetah and ant, for accelerators that run them.

Run on a CPU only so far, where C MuJoCo is quicker: untested on a GPU. Both compute in single precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.errors import MissingExtra


class MjxPhysics:
    """All environments' `frame_skip` physics steps in one compiled call; memory is shared by dlpack."""

    def __init__(self, model: Any, count: int, frame_skip: int) -> None:
        try:
            import jax
            from mujoco import mjx
        except ImportError:
            raise MissingExtra("mujoco-mjx", "mjx", 'env.options.physics = "mjx"') from None
        self._jax = jax
        on_device = mjx.put_model(model)
        one = mjx.make_data(on_device)

        def move(positions: Any, velocities: Any, controls: Any) -> Any:
            data = one.replace(qpos=positions, qvel=velocities, ctrl=controls)
            data = jax.lax.fori_loop(0, frame_skip, lambda _, data: mjx.step(on_device, data), data)
            return data.qpos, data.qvel

        self._move = jax.jit(jax.vmap(move))

    def move(self, positions: Tensor, velocities: Tensor, controls: Tensor) -> tuple[Tensor, Tensor]:
        """[N, nq], [N, nv] after the steps, from what was before them and [N, nu]."""
        shared = self._jax.dlpack.from_dlpack
        given = [shared(part.to(torch.float32).contiguous()) for part in (positions, velocities, controls)]
        positions, velocities = (torch.from_dlpack(part) for part in self._move(*given))
        return positions, velocities


class WarpPhysics:
    """One world an environment; tensors are views of Warp's arrays. `contacts`: room for those of one world."""

    def __init__(self, model: Any, count: int, frame_skip: int, *, contacts: int = 32) -> None:
        try:
            import mujoco_warp
            import warp
        except ImportError:
            raise MissingExtra("mujoco-warp", "warp", 'env.options.physics = "warp"') from None
        self._step, self._frame_skip = mujoco_warp.step, frame_skip
        self._model = mujoco_warp.put_model(model)
        self._data = mujoco_warp.make_data(model, nworld=count, nconmax=contacts, njmax=4 * contacts)
        self._positions, self._velocities, self._controls = (
            warp.to_torch(part) for part in (self._data.qpos, self._data.qvel, self._data.ctrl)
        )

    def move(self, positions: Tensor, velocities: Tensor, controls: Tensor) -> tuple[Tensor, Tensor]:
        """As `MjxPhysics.move`."""
        self._positions.copy_(positions)
        self._velocities.copy_(velocities)
        self._controls.copy_(controls)
        for _ in range(self._frame_skip):
            self._step(self._model, self._data)
        return self._positions, self._velocities
