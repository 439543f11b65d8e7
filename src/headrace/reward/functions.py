"""Turns one [[reward.functions]] table into a callable with one shape: requests in, one raw value for each out.

User code is imported only from where the config says: `pkg.module:fn` on the interpreter's own path, or `file.py:fn`
beside the config (just that file: its folder is not put on the path).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.errors import ConfigError
from headrace.imports import import_object, is_import_path
from headrace.protocols import RewardRequest
from headrace.reward.config import RewardConfig, RewardFunctionConfig
from headrace.reward.rules import RULES, build_rule

Shape = Literal["rule", "trl", "verl"]

VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_PARAMETERS = ("prompts", "completions", "completion_ids", "finish_reasons")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """One named, weighted component.

    call: takes the arguments that `arguments` or `argument_list` made for it
    accepts: parameter names that it may be given; None when it takes any
    """

    name: str
    weight: float
    unit: Literal["sample", "group"]
    shape: Shape
    call: Callable[..., Any]
    asynchronous: bool = False
    accepts: frozenset[str] | None = None
    options: Mapping[str, Any]

    def call_many(self, requests: Sequence[RewardRequest]) -> Any:
        """A TRL-shaped call for all requests at once: a list, or an awaitable of one."""
        return self.call(**self._accepted(trl_arguments(requests)))

    def call_one(self, request: RewardRequest) -> Any:
        """One request's raw value, or an awaitable of it; in TRL shape a list of one."""
        if self.shape == "rule":
            return self.call(request)
        if self.shape == "verl":
            return self.call(**self._accepted(verl_arguments(request)))
        return self.call_many([request])

    def _accepted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        arguments = {**arguments, **self.options}
        if self.accepts is None:
            return arguments
        return {name: value for name, value in arguments.items() if name in self.accepts}


def trl_arguments(requests: Sequence[RewardRequest]) -> dict[str, Any]:
    """prompts, completions, completion_ids, finish_reasons and every other column of the tasks, each a list.

    A conversational prompt comes with a conversational completion. A task without a column has None in it.
    """
    columns = dict.fromkeys(name for request in requests for name in request.task.payload if name != "prompt")
    arguments: dict[str, Any] = {name: [request.task.payload.get(name) for request in requests] for name in columns}
    return arguments | {
        "prompts": [request.prompt for request in requests],
        "completions": [
            request.completion
            if isinstance(request.prompt, str)
            else [{"role": "assistant", "content": request.completion}]
            for request in requests
        ],
        "completion_ids": [list(request.token_ids) for request in requests],
        "finish_reasons": [request.finish_reason for request in requests],
    }


def verl_arguments(request: RewardRequest) -> dict[str, Any]:
    """data_source, solution_str, ground_truth (column "ground_truth", verl's nested one, or "answer"), extra_info."""
    payload = request.task.payload
    nested = payload.get("reward_model")
    if "ground_truth" in payload:
        ground_truth = payload["ground_truth"]
    elif isinstance(nested, Mapping) and "ground_truth" in nested:
        ground_truth = nested["ground_truth"]
    else:
        ground_truth = payload.get("answer")
    extra_info = payload.get("extra_info")
    if not isinstance(extra_info, Mapping):
        extra_info = {name: value for name, value in payload.items() if name != "prompt"}
    return {
        "data_source": payload.get("data_source", request.task.source),
        "solution_str": request.completion,
        "ground_truth": ground_truth,
        "extra_info": dict(extra_info),
    }


def load_functions(config: RewardConfig, base_folder: Path) -> list[RewardFunction]:
    """All components of the score, with unique names. Raises `ConfigError` for the first that cannot be used."""
    if not config.functions:
        raise ConfigError(
            "reward.functions", "empty; name at least one, for example [[reward.functions]] use = 'exact'"
        )
    loaded: list[RewardFunction] = []
    for index, spec in enumerate(config.functions):
        function = load_function(spec, base_folder, f"reward.functions[{index}]")
        names = [other.name for other in loaded]
        if function.name in names and spec.name:
            raise ConfigError(f"reward.functions[{index}].name", f"{spec.name!r} is the name of another function too")
        loaded.append(_renamed(function, names))
    return loaded


def _renamed(function: RewardFunction, taken: list[str]) -> RewardFunction:
    """The function under the first free one of `name`, `name_2`, `name_3` ..."""
    name, count = function.name, 1
    while name in taken:
        count += 1
        name = f"{function.name}_{count}"
    values = {slot: getattr(function, slot) for slot in function.__slots__}
    return RewardFunction(**(values | {"name": name}))


def load_function(spec: RewardFunctionConfig, base_folder: Path, path: str) -> RewardFunction:
    """One component; `path` is the config key that errors speak of."""
    if spec.use in RULES:
        if spec.shape != "auto" or spec.unit != "sample":
            key = "shape" if spec.shape != "auto" else "unit"
            raise ConfigError(
                f"{path}.{key}", f"the built-in rule {spec.use!r} scores samples one by one; leave it out"
            )
        rule = build_rule(spec.use, spec.options, path)
        return RewardFunction(
            name=spec.name or spec.use, weight=spec.weight, unit="sample", shape="rule", call=rule, options={}
        )
    call = import_function(spec.use, base_folder, f"{path}.use")
    shape, accepts = _inspect(call, spec, path)
    return RewardFunction(
        name=spec.name or getattr(call, "__name__", None) or type(call).__name__,
        weight=spec.weight,
        unit=spec.unit,
        shape=shape,
        call=call,
        asynchronous=inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__),
        accepts=accepts,
        options=dict(spec.options),
    )


def import_function(use: str, base_folder: Path, path: str) -> Callable[..., Any]:
    """The callable that `pkg.module:fn` or `file.py:fn` names."""
    if not is_import_path(use):
        raise ConfigError(
            path, f"found {use!r}; valid: {', '.join(RULES)}, `pkg.module:function` or `file.py:function`"
        )
    found = import_object(use, base_folder, path)
    if inspect.isclass(found) or not callable(found):
        kind = "a class" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise ConfigError(path, f"{use!r} is {kind}; name a function or a callable object")
    return found


def _inspect(
    call: Callable[..., Any], spec: RewardFunctionConfig, path: str
) -> tuple[Literal["trl", "verl"], frozenset[str] | None]:
    """The calling convention, and the names it may be given (None: any). Refuses what could never be called."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"{path}.use", f"{spec.use!r} has no readable signature; wrap it in a function") from None
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in by_name]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    shape = spec.shape
    if shape == "auto":
        if "solution_str" in names:
            shape = "verl"
        elif "completions" in names or (takes_any and not names):
            shape = "trl"
        else:
            raise ConfigError(
                f"{path}.use",
                f"{spec.use!r} takes ({', '.join(names)}); wanted (prompts, completions, **columns), or"
                f" ({', '.join(VERL_PARAMETERS)})",
            )
    given = set(VERL_PARAMETERS if shape == "verl" else TRL_PARAMETERS)
    for p in parameters:
        needed = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if needed and (p.kind is p.POSITIONAL_ONLY or (shape == "verl" and p.name not in given | set(spec.options))):
            raise ConfigError(f"{path}.use", f"{spec.use!r} needs {p.name!r}, which the {shape} shape does not give")
    if shape == "verl" and spec.unit == "group":
        raise ConfigError(f"{path}.unit", "found 'group'; the verl shape scores one sample a call: valid: 'sample'")
    for option in spec.options:
        if option in given or (option not in names and not takes_any):
            raise ConfigError(
                f"{path}.options.{option}", f"{spec.use!r} cannot be given it; it takes {', '.join(names)}"
            )
    return shape, None if takes_any else frozenset(names)
