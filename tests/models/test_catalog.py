"""Paths and names to model folders, and what a user is told when one cannot be used."""

from __future__ import annotations

import json

import pytest

from headrace.config import ModelConfig
from headrace.errors import ModelError
from headrace.models import load_tokenizer, resolve_model
from headrace.models.tiny import make_tiny


def test_a_folder_with_config_and_weights_is_taken_as_it_is(tmp_path) -> None:
    make_tiny(tmp_path / "model", seed=0, warmup_steps=0)
    assert resolve_model(ModelConfig(path=str(tmp_path / "model"))) == tmp_path / "model"


def test_a_sharded_folder_needs_all_of_its_shards(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"lacks the weights two\.safetensors"):
        resolve_model(ModelConfig(path=str(tmp_path)))
    (tmp_path / "two.safetensors").write_bytes(b"")
    assert resolve_model(ModelConfig(path=str(tmp_path))) == tmp_path


@pytest.mark.parametrize(
    ("files", "part"),
    [
        (None, "is no folder"),
        ({}, r"holds no config\.json"),
        ({"config.json": "{}"}, "holds no weights"),
        ({"config.json": "{", "model.safetensors": ""}, r"config\.json cannot be read"),
        ({"config.json": "[]", "model.safetensors": ""}, "expected an object"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line(tmp_path, files, part) -> None:
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
    with pytest.raises(ModelError, match=part) as caught:
        resolve_model(ModelConfig(path=str(folder)))
    assert "\n" not in str(caught.value)


def test_no_name_lists_the_built_in_ones() -> None:
    with pytest.raises(ModelError, match="smollm2, tiny"):
        resolve_model(ModelConfig())


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path) -> None:
    make_tiny(tmp_path, seed=0, warmup_steps=0)
    assert load_tokenizer(tmp_path).pad_token_id == load_tokenizer(tmp_path).eos_token_id
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="no tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
