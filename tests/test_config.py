"""Turns TOML, presets and overrides into configs, and walks every pair of choices that must be refused."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import (
    RunConfig,
    ahead,
    config_from_dict,
    dump_config,
    load_config,
    preset_names,
    resolve,
)
from headrace.configbase import Config, field_types, is_config
from headrace.errors import ConfigError
from headrace.training.config import AlgorithmConfig
from headrace.valid_config import _READ_BY, available, validate

BASE = """
[model]
path = "tiny"
[tasks]
source = "sums"
[[reward.functions]]
use = "exact"
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def error_of(*overrides: str, text: str = BASE) -> str:
    """The one line that a config is refused with, by type, range or pair."""
    with pytest.raises(ConfigError) as caught:
        validate(config_from_dict(tomllib.loads(text), overrides))
    line = str(caught.value)
    assert "\n" not in line
    return line


# ------------------------------------------------------------------------------------------------- files and presets


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_validate_and_stay_short(name: str):
    from headrace.config import PRESETS_FOLDER

    assert validate(load_config(name, [])) == []
    assert load_config(name, []).name == name
    lines = (PRESETS_FOLDER / f"{name}.toml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert 10 <= len([line for line in lines if line.strip()]) <= 25


def test_the_three_presets_of_the_readme_exist():
    assert {"quickstart", "tiny", "smollm2-largest"} <= set(preset_names())


@pytest.mark.parametrize("name", ["tiny+", "+tiny", "+", "tiny++tiny"])
def test_a_sum_that_lacks_a_side(name: str):
    with pytest.raises(ConfigError, match=r"on either side of '\+'"):
        load_config(name)


def test_missing_file_and_unknown_preset(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent.toml' does not exist"):
        load_config(tmp_path / "absent.toml", [])
    with pytest.raises(ConfigError, match=r"'quikstart'.*did you mean 'quickstart'"):
        load_config("quikstart", [])
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path, [])


def test_toml_syntax_error_names_file_and_line(tmp_path: Path):
    path = tmp_path / "broken.toml"
    path.write_text("name = 'a'\n[training\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"broken.toml: not valid TOML: .*line 2"):
        load_config(path, [])
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(path, [])


def test_relative_paths_start_at_the_file_and_in_overrides_at_the_current_folder(tmp_path: Path, monkeypatch):
    (tmp_path / "conf").mkdir()
    path = tmp_path / "conf" / "my.toml"
    path.write_text(
        '[model]\npath = "models/a"\n[tasks]\nsource = "jsonl:train.jsonl"\n'
        '[[reward.functions]]\nuse = "score.py:fn"\n[[reward.functions]]\nuse = "pkg.mod:fn"\n'
    )
    monkeypatch.chdir(tmp_path)
    config = load_config(path, ["evaluation.source=jsonl:test.jsonl"])
    assert config.model.path == str(tmp_path / "conf/models/a")
    assert config.tasks.source == f"jsonl:{tmp_path}/conf/train.jsonl"
    assert [function.use for function in config.reward.functions] == [f"{tmp_path}/conf/score.py:fn", "pkg.mod:fn"]
    assert config.evaluation.source == f"jsonl:{tmp_path}/test.jsonl"


# ---------------------------------------------------------------------------------------------------------- overrides


def test_overrides_are_toml_values_or_bare_text(base: Path):
    config = load_config(
        base,
        [
            "rollout.sampling.temperature=0.8",
            "placement=sync",
            "name=42",
            'rollout.sampling.stop=["a", "b=c"]',
            "training.optimizer.betas=[0.8, 0.9]",
            "reward.functions=[{use='regex', options={pattern='x'}}, {use='exact', weight=2}]",
            "reward.functions.1.weight=3",
            "reward.functions.0.options.pattern=y=z",
            "staleness.max_version_lag=4",
            "tasks.shuffle=false",
        ],
    )
    assert config.rollout.sampling.temperature == 0.8
    assert (config.placement, config.name) == ("sync", "42")
    assert config.rollout.sampling.stop == ("a", "b=c")
    assert config.training.optimizer.betas == (0.8, 0.9)
    assert [function.weight for function in config.reward.functions] == [1.0, 3.0]
    assert config.reward.functions[0].options == {"pattern": "y=z"}
    assert config.staleness.max_version_lag == 4
    assert config.tasks.shuffle is False
    assert load_config(base, ["staleness.max_version_lag=4", "staleness.max_version_lag=none"]) == load_config(base, [])


def test_an_override_wins_over_the_file_and_the_last_over_the_first(base: Path):
    assert load_config(base, ["tasks.source=largest"]).tasks.source == "largest"
    assert load_config(base, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.steps", "override 'training.steps' is not of the form key.path=value"),
        ("=3", "is not of the form"),
        ("a..b=3", "is not of the form"),
        ("training.step=3", "training.step: unknown key (did you mean 'steps'?); valid in [training]: steps, groups"),
        ("trainig.steps=3", "trainig: unknown key (did you mean 'training'?)"),
        ("rollout.sampling.temprature=1", "rollout.sampling.temprature: unknown key (did you mean 'temperature'?)"),
        ("rollout.sampling.temperature=hot", 'rollout.sampling.temperature: found "hot", expected a number >= 0'),
        ("rollout.sampling.temperature=-1", "rollout.sampling.temperature: found -1, expected a number >= 0"),
        ("rollout.sampling.temperature=nan", "rollout.sampling.temperature: found nan, expected a number >= 0"),
        ("training.optimizer.lr=true", "training.optimizer.lr: found true, expected a number >= 0"),
        ("training.steps=2.5", "training.steps: found 2.5, expected a whole number >= 1"),
        ("training.steps=0", "training.steps: found 0, expected a whole number >= 1"),
        ("tasks.shuffle=yes", 'tasks.shuffle: found "yes", expected true or false'),
        ("placement=seperate", "expected one of sync, colocated, separate (did you mean 'separate'?)"),
        ("model=3", "model: found 3, expected a table with path, dtype"),
        ("seed.x=3", "seed: found a table with x, expected a whole number >= 0"),
        ("reward.functions.3.weight=1", "reward.functions: has 1 items, '3' is not the index of one"),
        ("reward.functions.0.wieght=1", "reward.functions.0.wieght: unknown key (did you mean 'weight'?)"),
        ("reward.functions=[{weight=2}]", "reward.functions.0.use: missing; expected text"),
        ("reward.functions=exact", 'reward.functions: found "exact", expected an array of tables'),
        ('rollout.sampling.stop=["a', "rollout.sampling.stop: '[\"a' is not a valid TOML value"),
        ("training.optimizer.betas=[0.9]", "training.optimizer.betas: found [0.9], expected an array of 2"),
        ("staleness.max_version_lag=-1", 'found -1, expected a whole number >= 0 or "none"'),
        (f"seed={10**26}", "expected a whole number >= 0 and at most 2^53"),
        (f"rollout.sampling.top_k={10**24}", "expected a whole number >= 0 and at most 2^53"),
        ("observability.sinks=['jsonl', 'csv']", "expected an array of one of jsonl, tensorboard, wandb, trackio"),
        ("seed=2026-01-01", 'seed: found "2026-01-01", expected a whole number >= 0'),
    ],
)
def test_a_mistake_gives_one_line_with_path_value_and_valid_ones(override: str, expected: str):
    assert expected in error_of(override)


# ---------------------------------------------------------------------------------------------------- there and back


def strategy(annotation: Any) -> st.SearchStrategy:
    """Any value that the annotation allows."""
    if is_config(annotation):
        hints = field_types(annotation)
        return st.builds(annotation, **{name: strategy(hint) for name, hint in hints.items()})
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    info = msgspec.inspect.type_info(annotation)
    match info:
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            low, high = info.ge if info.ge is not None else -(2**62), info.le if info.le is not None else 2**62
            return st.integers(low, high)
        case msgspec.inspect.FloatType():
            low, high = info.gt if info.gt is not None else info.ge, info.le if info.le is not None else info.lt
            return st.floats(low, high, exclude_min=info.gt is not None, allow_nan=False, allow_infinity=False)
        case msgspec.inspect.StrType():
            # A path would be made absolute, which is tested by itself.
            return st.text(st.characters(exclude_categories=["Cs"], exclude_characters=":"), max_size=12)
        case msgspec.inspect.UnionType():
            return st.one_of(strategy(part) for part in get_args(annotation))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.VarTupleType():
            return st.lists(strategy(get_args(annotation)[0]), max_size=3).map(tuple)
        case msgspec.inspect.TupleType():
            return st.tuples(*(strategy(part) for part in get_args(annotation)))
        case msgspec.inspect.DictType():
            key, value = get_args(annotation)
            return st.dictionaries(strategy(key), strategy(value), max_size=3)
    raise AssertionError(f"no strategy for {info}")


def with_known_model(config: RunConfig) -> RunConfig:
    """Paths as reading leaves them: absolute."""
    replace = msgspec.structs.replace
    engine = replace(config.rollout.engine, kv_folder="")
    return replace(config, model=replace(config.model, path="tiny"), rollout=replace(config.rollout, engine=engine))


@settings(max_examples=60, deadline=None)
@given(strategy(RunConfig).map(with_known_model))
def test_a_dumped_config_loads_again_equal(config: RunConfig):
    again = config_from_dict(tomllib.loads(dump_config(config)), [])
    assert again == config
    assert (
        config_from_dict(tomllib.loads(dump_config(resolve(config))), []) == resolve(config) == resolve(resolve(config))
    )


def test_what_follows_from_the_largest_numbers_can_be_read_again():
    config = resolve(load_config("tiny", [f"training.groups={2**53}", f"rollout.oversample={2**53}"]))
    assert config_from_dict(tomllib.loads(dump_config(config)), []) == config


def test_every_default_of_none_can_be_left_out():
    """dump leaves None out, so a field that may be None must default to it."""

    def walk(struct: type[Config]):
        for field in msgspec.structs.fields(struct):
            annotation = field_types(struct)[field.name]
            if is_config(annotation):
                walk(annotation)
            elif type(None) in get_args(annotation):
                assert field.default is None, field.name

    walk(RunConfig)


# ------------------------------------------------------------------------------------------------------------ resolving


def test_autos_become_concrete():
    separate = resolve(RunConfig())
    assert (separate.runtime, separate.buffer.depth, separate.weights.channel) == (
        "processes",
        "double",
        "shared_memory",
    )
    sync = resolve(RunConfig(placement="sync"))
    assert (sync.runtime, sync.buffer.depth, sync.weights.channel) == ("local", "none", "in_process")
    assert separate.group.min_complete == separate.group.size
    assert "auto" not in (separate.runtime, separate.buffer.depth, separate.weights.channel)


@pytest.mark.parametrize(
    ("depth", "limit", "expected"),
    [
        *(("none", None, 0), ("double", None, 1), ("queue", None, 3), ("stream", None, None), ("stream", 5, 5)),
        *(("queue", 2, 2), ("queue", 9, 3), ("double", 0, 0)),
    ],
)
def test_ahead_is_the_tightest_bound(depth: str, limit: int | None, expected: int | None):
    text = f"[buffer]\ndepth = '{depth}'\nsteps = 3\n" + (
        f"[staleness]\nmax_steps_ahead = {limit}\n" if limit is not None else ""
    )
    assert ahead(config_from_dict(tomllib.loads(text))) == expected


# ------------------------------------------------------------------------------------------------- the whole product

INTERRUPTIONS = ["never", "hold", "abort", "drain", "barrier"]
PARTIALS = ["continue", "resume_prefix", "restore", "recycle", "restart", "none"]
PLACEMENTS = ["sync", "colocated", "separate"]
DEPTHS = ["auto", "none", "double", "queue", "stream"]
SWITCHES = [
    (lag, steps, correction) for lag in (None, 0, 3) for steps in (None, 1) for correction in ("none", "truncate")
]


def refused_key(interruption, partial, placement, depth, lag, steps, correction, every, cancel) -> set[str]:
    """The keys that a refusal may name, by section 4 of the design; written apart from the code under test."""
    keys = set()
    cut_off = interruption == "abort"
    if (partial == "continue") != (interruption in ("never", "hold")) or (
        partial not in ("continue", "none") and not cut_off
    ):
        keys.add("weights.partial")
    if placement == "colocated" and interruption == "never":
        keys.add("weights.interruption")
    real_depth = depth if depth != "auto" else ("double" if placement == "separate" else "none")
    if placement != "separate" and real_depth != "none":
        keys.add("buffer.depth")
    if real_depth == "stream" and lag is None and steps is None and correction == "none":
        keys.add("buffer.depth")
    bounds = [{"none": 0, "double": 1, "queue": 2}.get(real_depth), steps]
    bound = min((b for b in bounds if b is not None), default=float("inf"))
    if every > 1 + bound:
        keys.add("weights.every_steps")
    if lag is not None and lag < every - 1:
        keys.add("staleness.max_version_lag")
    if cancel and lag is None:
        keys.add("staleness.cancel_group")
    return keys


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_the_product_of_the_axes_is_refused_exactly_where_the_design_says(interruption: str, placement: str):
    start = config_from_dict(tomllib.loads(BASE))
    replace = msgspec.structs.replace
    allowed = 0
    for partial, depth, (lag, steps, correction), every, cancel in itertools.product(
        PARTIALS, DEPTHS, SWITCHES, (1, 2, 3), (False, True)
    ):
        config = replace(
            start,
            placement=placement,
            buffer=replace(start.buffer, depth=depth),
            staleness=replace(start.staleness, max_version_lag=lag, max_steps_ahead=steps, cancel_group=cancel),
            training=replace(start.training, correction=replace(start.training.correction, kind=correction)),
            weights=replace(start.weights, interruption=interruption, partial=partial, every_steps=every),
        )
        expected = refused_key(interruption, partial, placement, depth, lag, steps, correction, every, cancel)
        try:
            validate(config)
            found = None
        except ConfigError as error:
            found = error.path
            assert "found " in str(error) and "\n" not in str(error)
        if expected:
            assert found in expected, (expected, found, config)
        else:
            allowed += 1
            assert found is None, (found, config)
    assert allowed or (placement, interruption) == ("colocated", "never")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["group.min_complete=9"], "group.min_complete: found 9, more than group.size = 8"),
        (
            ["training.minibatches=3"],
            "training.minibatches: found 3, which does not divide training.groups = 8; use one of 1, 2, 4, 8",
        ),
        (["rollout.sampling.min_tokens=65"], "rollout.sampling.min_tokens: found 65, more than max_tokens = 64"),
        (
            ["rollout.engine.context_length=64"],
            "rollout.sampling.max_tokens: found 64, which leaves no room for a prompt",
        ),
        (
            ["rollout.sampling.temperature=1e-5"],
            "rollout.sampling.temperature: found 1e-05, expected 0 or at least 0.001",
        ),
        (["rollout.sampling.temperature=inf"], "rollout.sampling.temperature: found inf"),
        (["rollout.sampling.top_p=nan"], "rollout.sampling.top_p: found nan"),
        (['rollout.sampling.stop=["a", ""]'], "rollout.sampling.stop: found an empty text"),
        (["rollout.sampling.logit_bias.5=-inf"], "rollout.sampling.logit_bias.5: found -inf, expected a finite number"),
        (
            ["rollout.engine.kv_tokens=8", "rollout.sampling.max_tokens=2"],
            "rollout.engine.kv_tokens: found 8, less than one block",
        ),
        (
            ["rollout.engine.deterministic=true", "rollout.engine.max_running=2000"],
            "rollout.engine.max_running: found 2000 with deterministic",
        ),
        (["rollout.engine.kv_tokens=64"], "rollout.engine.kv_tokens: found 64, too few"),
        (["rollout.sampling.stop_token_ids=[3, -1]"], "rollout.sampling.stop_token_ids.1: found -1"),
        (["training.optimizer.betas=[0.9, 1.0]"], "training.optimizer.betas.1: found 1.0"),
        (["training.correction.low=3"], "training.correction.low: found 3.0, above"),
        (["limits.stall_stop_s=1"], "limits.stall_stop_s: found 1, below"),
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature: found 0 (greedy)"),
        (["evaluation.every_steps=5"], "evaluation.every_steps: found 5 without evaluation.source"),
        (["weights.channel=in_process"], 'weights.channel: found "in_process" with runtime = "processes"'),
        (["tasks.source=clients"], 'tasks.source: found "clients", which goes with rollout.source = "http"'),
        (
            ["rollout.source=http", "weights.interruption=abort", "weights.partial=restart"],
            'weights.partial: found "restart" with rollout.source',
        ),
        (["rollout.source=http", "rollout.function=own.py:twice"], "rollout.function: found with rollout.source"),
        (["rollout.source=redis"], 'rollout.source: found "redis" without env.id'),
        (["name=a/b"], 'name: found "a/b"'),
        (["tasks.source="], "tasks.source: missing"),
        (["model.path="], "model.path: missing"),
        (["reward.functions=[]"], "reward.functions: missing"),
        (
            ["reward.functions=[{use='exact'}, {use='exact'}]"],
            'reward.functions.1.name: found "exact", the name of reward.functions.0',
        ),
    ],
)
def test_numbers_and_inputs_that_cannot_work(overrides: list[str], expected: str):
    assert expected in error_of(*overrides)


ADAPTER = "training.lora.kind=adapter"
REMOTE = ("env.id=CartPole-v1", "rollout.source=redis")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([ADAPTER, "rollout.engine.kind=hf"], 'rollout.engine.kind: found "hf"'),
        ([ADAPTER, "weights.scope=changed"], 'weights.scope: found "changed"'),
        (["weights.kv_on_swap=finish"], 'weights.kv_on_swap: found "finish" with training.lora.kind = "off"'),
        (
            ["weights.kv_on_swap=finish", "training.lora.kind=merged"],
            'weights.kv_on_swap: found "finish" with training.lora.kind = "merged"',
        ),
        (
            [ADAPTER, "weights.kv_on_swap=finish", "weights.interruption=hold"],
            'weights.kv_on_swap: found "finish" with weights.interruption = "hold"',
        ),
        ([ADAPTER, "weights.kv_on_swap=finish", "rollout.engine.deterministic=true"], "one adapter"),
        ([ADAPTER, "training.lora.target_modules=[q_proj, lm_head]"], "training.lora.target_modules"),
        ([ADAPTER, 'training.lora.target_modules=["q_proj", "lm_head"]'], 'target_modules.1: found "lm_head"'),
        ([ADAPTER, "env.id=CartPole-v1"], 'training.lora.kind: found "adapter" with env.id'),
        ([ADAPTER, "training.lora.rank=0"], "training.lora.rank"),
    ],
)
def test_what_adapters_cannot_be_had_with(overrides: list[str], expected: str):
    assert expected in error_of(*overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [*REMOTE, "weights.interruption=drain", "weights.partial=none"],
            'weights.interruption: found "drain" with rollout',
        ),
        (
            [*REMOTE, "weights.channel=shared_memory"],
            'weights.channel: found "shared_memory" with rollout.source = "redis"',
        ),
        ([*REMOTE, "weights.channel=http", "weights.scope=changed"], 'weights.scope: found "changed" with rollout'),
        (
            [*REMOTE, "evaluation.source=episodes"],
            'evaluation.source: found "episodes" with rollout.source = "redis"; leave',
        ),
        ([*REMOTE, "env.workers=2"], "env.workers: found 2 with rollout.source"),
        ([*REMOTE, "runtime=ray"], 'runtime: found "ray" with rollout.source'),
        (["env.id=sim:CartPole-v1", "env.frame_stack=4"], "env.frame_stack: found 4 with 'sim:CartPole-v1'"),
        (["env.id=envpool:Pong-v5", "env.autoreset=disabled"], 'env.autoreset: found "disabled"'),
        (
            [
                "env.id=CartPole-v1",
                "policy.recurrent=gru",
                "env.count=2",
                "training.groups=1",
                "training.minibatches=4",
            ],
            "training.minibatches: found 4, and a batch is cut between environments with policy.recurrent",
        ),
        (
            ["env.id=CartPole-v1", "env.count=1", "env.steps=2", "training.groups=1", "training.minibatches=4"],
            "training.minibatches: found 4, and a batch is cut between steps",
        ),
        (
            ["env.id=CartPole-v1", "policy.network=mine.py:Net", "policy.normalise_observations=true"],
            "policy.normalise_observations: found true with policy.network",
        ),
        (
            ["env.id=CartPole-v1", "algorithm.kind=dqn", "training.epochs=2"],
            'training.epochs: found 2 with algorithm.kind = "dqn"',
        ),
        (
            ["env.id=Pendulum-v1", "algorithm.kind=sac", "training.minibatches=2"],
            'training.minibatches: found 2 with algorithm.kind = "sac"',
        ),
        (
            ["env.id=CartPole-v1", "algorithm.kind=impala", "algorithm.clip=0.1"],
            'algorithm.clip: found 0.1 with algorithm.kind = "impala", which does not read it (it is of ppo, appo)',
        ),
        (["env.id=CartPole-v1", "evaluation.source=heldout"], 'evaluation.source: found "heldout" with env.id'),
        (["env.id=CartPole-v1", "evaluation.every_steps=5"], "evaluation.every_steps: found 5 without"),
        (["evaluation.source=episodes"], 'evaluation.source: found "episodes", which goes with env.id'),
    ],
)
def test_what_control_would_silently_ignore_is_refused(overrides: list[str], expected: str):
    assert expected in error_of(*overrides)


def test_of_every_key_of_an_algorithm_it_is_known_who_reads_it():
    assert set(_READ_BY) == set(AlgorithmConfig.__struct_fields__) - {"kind", "gamma"}


@pytest.mark.parametrize(
    "override",
    ["weights.channel=mesh", "runtime=simulated", "training.backend=scripted"],
)
def test_parts_that_do_not_exist_yet_say_which_do(override: str):
    line = error_of(override, "weights.interruption=hold")
    key, _, value = override.partition("=")
    assert line.startswith(f'{key}: found "{value}", which is not available')
    assert all(choice in line for choice in available()[key])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["staleness.max_version_lag=0"], "staleness.max_version_lag: 0 is below how far"),
        (["buffer.depth=stream", "staleness.max_version_lag=9"], "without bound"),
        (["group.size=1", "training.advantage.kind=leave_one_out"], "group.size: 1 leaves leave_one_out nothing"),
        (["runtime=local"], "runtime:"),
        (["rollout.sampling.top_p=0.9"], "rollout.sampling: top_p"),
        (["reward.functions.0.weight=0"], "every weight is 0"),
        (["reward.workers=0"], "reward.workers"),
        (["training.loss.kind=reinforce", "training.epochs=2"], "reinforce has no ratio"),
        (["training.optimizer.warmup_steps=40"], "warmup_steps: 40 lasts"),
    ],
)
def test_what_works_but_surprises_is_a_warning(overrides: list[str], expected: str):
    warnings = validate(config_from_dict(tomllib.loads(BASE), overrides))
    assert len(warnings) == 1 and expected in warnings[0]
    assert validate(config_from_dict(tomllib.loads(BASE))) == []


@pytest.mark.parametrize(
    ("url", "address", "warned"),
    [
        ("redis://learner:6379/0", "127.0.0.1:0", True),
        ("redis://:pw@learner:6379/0", "learner:7000", False),
        ("redis://:pw@127.0.0.1:6379/0", "127.0.0.1:0", False),
    ],
)
def test_actors_elsewhere_need_an_address_of_the_weights(url: str, address: str, warned: bool):
    config = load_config("impala", ["rollout.source=redis", f"buffer.url={url}", f"weights.address={address}"])
    assert [line.partition(":")[0] for line in validate(config)] == ["weights.address"] * warned


def test_half_a_run_needs_half_the_inputs():
    config = config_from_dict(tomllib.loads(BASE), ["tasks.source=", "reward.functions=[]"])
    assert validate(config, only="train") == []
    greedy = config_from_dict(tomllib.loads(BASE), ["rollout.sampling.temperature=0"])
    assert validate(greedy, only="rollout") == []


def test_what_is_called_available_is_there():
    import headrace

    folders = {
        "runtime": "orchestrator/runtimes",
        "buffer.store": "exchange/stores",
        "weights.channel": "exchange/channels",
        "training.backend": "training/backends",
    }
    for path, folder in folders.items():
        for choice in available()[path]:
            assert (Path(headrace.__file__).parent / folder / f"{choice}.py").is_file(), (path, choice)


@pytest.mark.parametrize("address", ["999.1.1.1", "nosuch.invalid", "host:99999", ":5"])
def test_an_address_without_a_port_is_refused_before_anything_runs(address):
    with pytest.raises(ConfigError, match=r"weights\.address: found .* expected HOST:PORT"):
        validate(load_config("tiny", ["weights.channel=http", f"weights.address={address}"]))
