"""The built-in character-level model: a real folder, its tokenizer, and a warm-up that starts where GRPO can work."""

from __future__ import annotations

import pytest
import torch

from headrace.config import ModelConfig
from headrace.models import load_tokenizer, resolve_model
from headrace.models import tiny as module
from headrace.models.tiny import VOCABULARY, answer_probability, encode_sums, make_tiny, tiny_folder
from headrace.rollout.config import TasksConfig
from headrace.rollout.environments.single_turn import SingleTurn
from headrace.rollout.sources.arithmetic import sums_problems
from headrace.rollout.tasks import open_source


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_untrained_depends_on_the_seed_alone_and_disturbs_no_global_state(tmp_path) -> None:
    torch.manual_seed(7)
    expected, threads = torch.get_rng_state(), torch.get_num_threads()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny(tmp_path / name, seed, warmup_steps=0)
        torch.rand(3)
    torch.set_rng_state(expected)
    make_tiny(tmp_path / "d", 0, warmup_steps=2)
    assert torch.equal(torch.get_rng_state(), expected) and torch.get_num_threads() == threads
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abcd"}
    assert weights["a"] == weights["b"] != weights["c"]
    assert weights["d"] != weights["a"]
    model = load(tmp_path / "a")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.965e6, rel=0.06)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == VOCABULARY.index("<end>")


def test_the_tokenizer_survives_saving_and_has_one_token_a_character(tmp_path) -> None:
    make_tiny(tmp_path, 0, warmup_steps=0)
    tokenizer = load_tokenizer(tmp_path)
    text = "27+41= 68"
    ids = tokenizer(text)["input_ids"]
    assert [VOCABULARY[i] for i in ids] == list(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("2x3\n")["input_ids"] == [VOCABULARY.index(t) for t in ("2", "<unk>", "3", "<unk>")]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == VOCABULARY.index("<end>")


def test_warm_up_examples_are_the_prompts_that_the_source_asks(tmp_path) -> None:
    make_tiny(tmp_path, 0, warmup_steps=0)
    environment = SingleTurn(load_tokenizer(tmp_path), TasksConfig())
    source = open_source(TasksConfig(source="sums", options={"style": "plain"}), seed=0, folder=tmp_path)
    for _ in range(20):
        task = source.next()
        prompt = environment.render(task)
        ids, targets = encode_sums([(task.payload["a"], task.payload["b"])])
        wanted = targets[0] >= 0
        assert ids[0, : len(prompt)].tolist() == prompt
        assert wanted.nonzero()[0].item() == len(prompt) - 1
        answer = targets[0][wanted].tolist()
        assert environment.decode(answer) == task.payload["answer"] and answer[-1] == VOCABULARY.index("<end>")
        assert ids[0, len(prompt) : len(prompt) + len(answer) - 1].tolist() == answer[:-1]


def test_answer_probability_is_the_share_of_samples_that_are_right(tmp_path) -> None:
    make_tiny(tmp_path, 0, warmup_steps=5)
    model = load(tmp_path)
    ids, targets = encode_sums([(10, 10)])
    exact = answer_probability(model, ids, targets)
    with torch.no_grad():
        probabilities = model(input_ids=ids).logits.softmax(-1)[0]
    by_hand = 1.0
    for position in (5, 6, 7):
        by_hand *= probabilities[position, targets[0, position]].item()
    assert exact == pytest.approx(by_hand, rel=1e-4)
    assert 0 < exact < 1


def test_it_is_cached_by_seed_and_recipe(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "RECIPE", module.Recipe(max_steps=2))
    lines: list[str] = []
    first = resolve_model(ModelConfig(path="tiny"), seed=3, progress=lines.append)
    assert any("seed 3" in line for line in lines) and any("loss" in line for line in lines)
    lines.clear()
    assert resolve_model(ModelConfig(path="tiny"), seed=3, progress=lines.append) == first
    assert not lines
    assert tiny_folder(4, lines.append) != first
    monkeypatch.setattr(module, "RECIPE", module.Recipe(max_steps=3))
    assert tiny_folder(3, lines.append) != first


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_warmed_up_model_is_right_about_two_times_in_five_on_heldout_sums(seed, tmp_path) -> None:
    make_tiny(tmp_path, seed)
    ids, targets = encode_sums(sums_problems(heldout=True))
    assert 0.3 <= answer_probability(load(tmp_path), ids, targets) <= 0.5
