"""The fixtures of whole runs."""

from runs.launch import lab, untrained

__all__ = ["lab", "untrained"]
