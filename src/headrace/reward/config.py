"""What the reward plane is told: which functions score, with which weights, in how many processes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.configbase import Config, NonNegative

JsonScalar = str | int | float | bool


class RewardFunctionConfig(Config):
    """[[reward.functions]]: one component of the score."""

    use: str
    """`exact`, `numeric`, `regex`, `length`, `first_number`, `task` (the source's own verifier), `pkg.module:fn` or `file.py:fn`."""
    name: str = ""
    """Name in metrics; the function's own when empty."""
    weight: float = 1.0
    """Factor of this component in the score."""
    shape: Literal["auto", "trl", "verl"] = "auto"
    """Calling convention of a user's function; auto: verl when its parameters are named so."""
    unit: Literal["sample", "group"] = "sample"
    """What one call needs: sample, as soon as an answer has ended; group, when all siblings have."""
    options: dict[str, JsonScalar] = {}
    """Keyword arguments of the rule or function."""


class RewardConfig(Config):
    """[reward]: samples into scores."""

    functions: tuple[RewardFunctionConfig, ...] = ()
    workers: NonNegative = 1
    """Processes that run the functions; 0 runs them in the controller (they can then not be killed)."""
    timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    """A call beyond it is killed with its worker, which is replaced."""
    on_error: Literal["exclude", "zero"] = "exclude"
    """What a failed score becomes: no score (the episode leaves the baseline), or reward 0."""

    @property
    def unit(self) -> Literal["sample", "group"]:
        """One function that wants its group makes all wait for the group."""
        return "group" if any(function.unit == "group" for function in self.functions) else "sample"
