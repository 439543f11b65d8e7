"""Turns configs that will and will not work into the page and the exit code of `headrace check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.check import check, end_tokens, plausible_answer
from headrace.config import load_config, resolve
from headrace.errors import ConfigError, DataError, ModelError
from headrace.estimates import ModelShape, batch_arithmetic, count, kv_tokens, memory_parts, model_shape
from headrace.nearest import answers
from headrace.types import Task

SHAPE = ModelShape(
    parameters=1000, layers=2, hidden=8, inner=16, heads=4, kv_heads=2, head_size=2, vocabulary=50, context=100
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The tiny model, not warmed up."""
    from headrace.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder, 0, warmup_steps=0)
    return folder


def page(model: Path, capsys, *overrides: str) -> tuple[int, str, str]:
    config = load_config(
        "tiny", [f"model.path={model}", "training.groups=4", "rollout.sampling.max_tokens=8", *overrides]
    )
    code = check(config)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_config_that_works(model, capsys):
    code, out, err = page(model, capsys)
    assert (code, err) == (0, "")
    assert "4 groups of 8 answers: 32 samples of at most 8 tokens" in out
    assert out.count(": 6 tokens\n") == 4
    assert "end tokens: '<end>' (0)" in out
    assert out.count("reward 1.0") == 4 and out.count("reward 0.0") == 4
    assert "ready to run" in out


def test_a_prompt_longer_than_the_context(model, capsys):
    code, _, err = page(model, capsys, "rollout.engine.context_length=6", "rollout.sampling.max_tokens=2")
    assert code == 2
    assert err.startswith("headrace: tasks.source: a prompt of 6 tokens leaves no room in a context of 6; shorten")


def test_an_answer_that_is_cut_is_a_warning(model, capsys):
    code, out, _ = page(model, capsys, "rollout.engine.context_length=10")
    assert code == 0 and "answers are cut at 4" in out


def test_a_cache_too_small_for_one_answer(model, capsys):
    code, _, err = page(model, capsys, "rollout.engine.kv_tokens=12", "rollout.engine.block_size=4")
    assert code == 2 and "rollout.engine.kv_tokens: found 12, but one prompt and its answer may take 14" in err


def test_rewards_that_always_fail_and_hang(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("headrace.check.REWARD_TIMEOUT_S", 0.5)
    file = tmp_path / "score.py"
    file.write_text(
        "def broken(prompts, completions, **columns):\n    return 1 / 0\n"
        "def stuck(prompts, completions, **columns):\n    while True: pass\n"
        "def flat(prompts, completions, **columns):\n    return [0.5] * len(prompts)\n"
    )
    code, _, err = page(model, capsys, f"reward.functions=[{{use='{file}:broken'}}]")
    assert code == 2 and "every answer failed to be scored" in err and "ZeroDivisionError" in err
    code, out, _ = page(model, capsys, f"reward.functions=[{{use='{file}:flat'}}]")
    assert code == 0 and "all score 0.5" in out
    code, _, err = page(model, capsys, f"reward.functions=[{{use='{file}:stuck'}}]", "tasks.limit=1")
    assert code == 2 and "every answer failed to be scored" in err


def test_too_few_tasks_for_a_batch_and_for_the_run(model, tmp_path, capsys):
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(3)))
    few = (f"tasks.source=jsonl:{file}", "tasks.options={}", "tasks.epochs=1", "evaluation.source=")
    code, _, err = page(model, capsys, *few)
    assert code == 2 and "training.groups: found 4, but tasks.source gives 3 tasks in 1 epoch; use at most 3" in err
    code, out, _ = page(model, capsys, *few, "tasks.epochs=2", "training.steps=2")
    assert code == 0 and "6 tasks are enough for 1 of 2 steps" in out
    code, _, err = page(model, capsys, *few, "tasks.epochs=0", "evaluation.source=heldout")
    assert code == 2 and "evaluation.source" in err


def test_what_is_missing_is_one_error(model, tmp_path, capsys):
    with pytest.raises(ModelError):
        page(tmp_path / "absent", capsys)
    with pytest.raises(DataError):
        page(model, capsys, "tasks.source=jsonl:absent.jsonl", "tasks.options={}")
    with pytest.raises(ConfigError):
        page(model, capsys, "reward.functions=[{use='absent.py:fn'}]")


# ------------------------------------------------------------------------------------------------------- the estimates


def test_model_shape_counts_tied_weights_once(model):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    shape = model_shape(model)
    assert shape.parameters == sum(parameter.numel() for parameter in loaded.parameters())
    assert (shape.layers, shape.hidden, shape.vocabulary) == (2, 192, loaded.config.vocab_size)


def test_a_cut_weight_file_is_one_line(model, tmp_path):
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:50])
    with pytest.raises(ModelError, match="no whole safetensors file"):
        model_shape(tmp_path)


def test_memory_by_hand():
    config = resolve(
        load_config(
            "tiny",
            [
                "training.groups=2",
                "rollout.sampling.max_tokens=8",
                "training.micro_tokens=9999",
                "group.size=3",
                "rollout.engine.kv_tokens=64",
            ],
        )
    )
    parts = memory_parts(config, SHAPE, prompt_tokens=6)
    assert parts["trainer: weights"] == 4000
    assert parts["trainer: AdamW moments"] == 8000
    assert "trainer: activations of 60 tokens" in parts  # 2 groups x (one prompt of 6 + 3 answers of 8)
    assert parts["engine: 64 tokens of keys and values, 1x"] == 64 * 2 * 2 * 2 * 2 * 4
    assert parts["weight channel: shared_memory"] == 8000
    assert not any("reference" in part for part in parts)
    with_kl = resolve(load_config("tiny", ["training.loss.kl_coef=0.1"]))
    assert memory_parts(with_kl, SHAPE, 6)["trainer: reference model"] == 4000


def test_cache_bound_defaults_to_full_length_sequences():
    config = load_config("tiny", ["rollout.engine.max_running=3"])
    assert kv_tokens(config, SHAPE) == 300
    assert kv_tokens(load_config("tiny", ["rollout.engine.max_running=4000"]), SHAPE) == 32_768


def test_batch_arithmetic_in_words():
    config = resolve(
        load_config(
            "quickstart",
            ["buffer.depth=queue", "buffer.steps=3", "rollout.oversample=2", "staleness.max_version_lag=1"],
        )
    )
    text = "\n".join(batch_arithmetic(config))
    assert "8 groups of 16 answers: 128 samples of at most 6 tokens" in text
    assert "Rollout may run 3 batches ahead: 34 groups are held at most" in text
    assert "more than 1 version old are dropped" in text
    sync = "\n".join(batch_arithmetic(resolve(load_config("quickstart", ["placement=sync"]))))
    assert "Generation and training alternate" in sync


def test_counting_words():
    assert [count(1, "batch"), count(2, "batch"), count(1000, "pass"), count(0, "step")] == [
        "1 batch",
        "2 batches",
        "1,000 passes",
        "0 steps",
    ]


def test_end_tokens_are_the_tokenizers_the_models_and_the_configs(tmp_path):
    class Tokenizer:
        eos_token_id = 3

    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert end_tokens(tmp_path, Tokenizer(), (9, 5)) == [3, 5, 7, 9]


def test_plausible_answer_is_the_tasks_own():
    assert plausible_answer(Task(task_id="a", source="s", payload={"prompt": "", "answer": "7"})) == " 7"
    assert plausible_answer(Task(task_id="a", source="s", payload={"prompt": ""})) == " 42"


def test_control_shows_its_environment_and_policy(capsys):
    assert check(load_config("cartpole", ["training.groups=2"])) == 0
    out = capsys.readouterr().out
    assert "2 trajectories of 64 x 32 steps make a batch of 4,096 steps" in out
    assert "shows obs: vector [4] float32" in out and "takes discrete [] of 2 choices" in out


def test_a_config_for_clients_needs_no_prompts_and_says_what_it_understands(model, capsys):
    code, shown, _ = page(model, capsys, "rollout.source=http", "reward.functions=[]", 'tasks.source=""')
    assert code == 0
    assert "from clients of the HTTP API" in shown and "clients post scores" in shown
    assert "/v1/completions only" in shown, "tiny has no chat template"


@pytest.mark.parametrize(
    "url", ["garbage", "redis://127.0.0.1:abc/0", "redis://127.0.0.1:99999/0", "redis://[::1", "redis://" + "a" * 80]
)
def test_what_is_no_address_has_no_server(url):
    assert not answers(url)
