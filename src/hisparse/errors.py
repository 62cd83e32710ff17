"""Errors raised for bad input; each message names the value that is wrong and what would be right.

The command line turns a :class:`HiSparseError` into one line on stderr and exit code 2. Anything else is a bug and
keeps its traceback.
"""

from __future__ import annotations


class HiSparseError(Exception):
    """Base of every error that a user can cause and repair."""


class ConfigError(HiSparseError):
    """A configuration key, value or combination that cannot work."""


class InputError(HiSparseError):
    """A prompt, file or argument that cannot be used."""


class ModelError(HiSparseError):
    """Weights, tokenizer or companion files (TLIF, calibration) that are missing, damaged or of another model."""


class FormatError(HiSparseError):
    """Values or bytes that the packed format cannot represent."""


class UnsupportedError(HiSparseError):
    """A feature that HiSparse refuses because its result would be wrong."""
