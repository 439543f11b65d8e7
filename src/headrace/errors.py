"""Every error that headrace raises on purpose.

HeadraceError
├── UserError              the user can mend it: one line, exit code 2
│   ├── ConfigError        a config key: path, value found, what is valid
│   ├── DataError          a task file, dataset or prompt
│   ├── ModelError         a model folder, tokenizer or cached file
│   ├── MissingExtra       an optional package: names the extra to install
│   └── RunDirError        a run folder: exists, is not one, or is damaged
├── RunError               the run cannot go on: exit code 1
│   ├── ConservationError  a law of the flow is broken (names the ids)
│   ├── NoEngines          no engine is left and none joined in time
│   ├── Starved            too many units dropped since the last trained one
│   ├── Stalled            nothing moved within the time allowed
│   └── TrainingFailed     the trainer died or produced a non-finite state
├── PartFailed             one call to one part failed; the flow decides what becomes of it
│   ├── WorkerDied         the process behind a proxy is gone
│   ├── CallTimeout        a call passed its deadline
│   ├── RequestRefused     an engine can never serve this request (prompt longer than the context)
│   ├── StaleTicket        a receiver refused to go back to an older version
│   ├── BaseMissing        what changed was sent to a receiver that has another version than the one before
│   └── UnitLost           a store no longer has the bytes of a unit
├── RolloutDropped         this attempt ends without a unit, by a named reason
│   └── RolloutRecycled    ... and its task goes back to the pool with what was done already
└── BufferClosed           admission has ended
"""

from __future__ import annotations

from typing import Any


class HeadraceError(Exception):
    """Root of all errors raised on purpose. All of them travel between processes as themselves."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own way calls the constructor with the message alone, which ours do not all take
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(kind: type[HeadraceError], args: tuple[Any, ...], state: dict[str, Any]) -> HeadraceError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UserError(HeadraceError):
    """Something that the user can mend. The message says what is wrong, the value found and what to change."""


class ConfigError(UserError):
    """A config key that cannot be used."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path


class DataError(UserError):
    """Tasks that cannot be read or used."""


class ModelError(UserError):
    """A model folder that cannot be loaded, or whose bytes are not those expected."""


class MissingExtra(UserError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str, what: str) -> None:
        super().__init__(f"{what} needs the package {package!r}, which is not installed: {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """The command for a package set."""
    return f"pip install 'headrace[{extra}]' (in a clone: .venv/bin/pip install -e '.[{extra}]')"


class RunDirError(UserError):
    """A run folder that exists already, is not one, or is damaged."""


class RunError(HeadraceError):
    """The run cannot go on."""


class ConservationError(RunError):
    """submitted = trained + dropped + in flight does not hold. `ids` names the units at fault."""

    def __init__(self, message: str, ids: list[str] | None = None) -> None:
        super().__init__(message)
        self.ids = ids or []


class NoEngines(RunError):
    """Every engine is fenced and no replacement joined in time."""


class Starved(RunError):
    """Units are produced and dropped, none is trained. The message names the reasons and a remedy."""


class Stalled(RunError):
    """Nothing moved for longer than allowed. The message lists each part's state."""


class TrainingFailed(RunError):
    """The trainer is gone, or its state is no longer finite."""


class PartFailed(HeadraceError):
    """One call to one part failed."""


class WorkerDied(PartFailed):
    """The process behind a proxy is gone."""


class CallTimeout(PartFailed):
    """A call passed its deadline."""


class RequestRefused(PartFailed):
    """An engine can never serve this request."""


class StaleTicket(PartFailed):
    """A receiver refused to load a version older than the one it runs."""


class BaseMissing(PartFailed):
    """A receiver was sent what changed since a version that it does not have: it needs the weights whole."""


class UnitLost(PartFailed):
    """A store no longer has the bytes of a unit that it took."""


class RolloutDropped(HeadraceError):
    """An attempt that yields no unit. `reason` is the ledger's drop reason."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.reason, self.detail))


class RolloutRecycled(RolloutDropped):
    """The task goes to the front of the pool; `remainder` holds the members' finished work."""

    def __init__(self, remainder: Any, detail: str = "") -> None:
        super().__init__("recycled", detail)
        self.remainder = remainder

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.remainder, self.detail))


class BufferClosed(HeadraceError):
    """Admission has ended: the source is exhausted or the run is stopping."""
