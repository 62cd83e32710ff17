"""Models by name: the embedded default model, a local directory, a GGUF file, or a hub id.

`load_model` is the one door; `context_window` says how many positions a model can address.
"""

from __future__ import annotations

from hisparse.models.fetch import cache_directory
from hisparse.models.load import DEFAULT_MODEL, context_window, default_gguf, load_model

__all__ = ["DEFAULT_MODEL", "cache_directory", "context_window", "default_gguf", "load_model"]
