"""A checkpoint folder is whole or not there, and a damaged one names its file."""

import pytest

from headrace.errors import RunDirError
from headrace.training.checkpoint_folder import copy_companions, verify_folder, write_folder


def fill(text):
    def write(folder):
        (folder / "weights.safetensors").write_text(text)
        (folder / "config.json").write_text("{}")

    return write


def test_what_is_written_verifies_and_replaces_the_old(tmp_path):
    target = tmp_path / "step-1"
    (tmp_path / ".step-1.writing-999999").mkdir()  # its writer was killed
    write_folder(str(target), fill("one"))
    write_folder(str(target), fill("two"))
    assert set(verify_folder(str(target))) == {"weights.safetensors", "config.json"}
    assert (target / "weights.safetensors").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_write_that_fails_leaves_the_last_good_one(tmp_path):
    target = tmp_path / "step-1"
    write_folder(str(target), fill("good"))

    def full_disk(folder):
        (folder / "weights.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_folder(str(target), full_disk)
    verify_folder(str(target))
    assert (target / "weights.safetensors").read_text() == "good"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "no_manifest", "bad_manifest", "outside"])
def test_damage_names_the_file(tmp_path, damage):
    target = tmp_path / "step-1"
    write_folder(str(target), fill("some bytes"))
    weights, manifest = target / "weights.safetensors", target / "manifest.json"
    named = "weights.safetensors"
    match damage:
        case "flip":
            weights.write_text("some bytez")
        case "cut":
            weights.write_text("some")
        case "remove":
            weights.unlink()
        case "no_manifest":
            manifest.unlink()
            named = "manifest.json"
        case "bad_manifest":
            manifest.write_text("{")
            named = "manifest.json"
        case "outside":
            manifest.write_text(manifest.read_text().replace("config.json", "../config.json"))
            named = "config.json"
    with pytest.raises(RunDirError, match=named):
        verify_folder(str(target))


def test_companions_are_copied_but_no_weights_and_nothing_written_anew(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir()
    target.mkdir()
    names = (
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
        "config.json",
    )
    for name in (*names, "optimizer.pt", "trainer.json"):
        (source / name).write_text("old")
    (target / "config.json").write_text("new")
    copy_companions(source, target)
    assert {p.name for p in target.iterdir()} == {"tokenizer.json", "chat_template.jinja", "config.json"}
    assert (target / "config.json").read_text() == "new"
