"""HiSparse: a KV-cache memory system for long-context inference.

The names below are loaded on first use, so that ``import hisparse`` (and ``hisparse --help``) stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hisparse.cache.report import CacheReport
    from hisparse.config import HiSparseConfig
    from hisparse.errors import HiSparseError
    from hisparse.integrations.transformers import HiSparseCache
    from hisparse.models import load_model

__version__ = "0.1.0"

_HOME = {
    "HiSparseConfig": "hisparse.config",
    "HiSparseError": "hisparse.errors",
    "HiSparseCache": "hisparse.integrations.transformers",
    "CacheReport": "hisparse.cache.report",
    "load_model": "hisparse.models",
}

__all__ = ["CacheReport", "HiSparseCache", "HiSparseConfig", "HiSparseError", "__version__", "load_model"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hisparse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
