"""What a weight sync does to generations that are running, as three facts that the sync reads."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protocols import RunningPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """running: what `commit` does to generations on the engine
    drain: close the gate and wait for requests on engines before the commit
    wait_scoring: wait for scoring in progress as well
    """

    running: RunningPolicy = "go_on"
    drain: bool = False
    wait_scoring: bool = False


INTERRUPTIONS = {
    "never": Interruption(),
    "hold": Interruption(running="freeze"),
    "abort": Interruption(running="abort"),
    "drain": Interruption(drain=True),
    "barrier": Interruption(drain=True, wait_scoring=True),
}
