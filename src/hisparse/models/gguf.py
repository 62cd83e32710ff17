"""GGUF files: checked before use, converted once to a safetensors directory so that later loads take a second.

transformers reads GGUF but dequantises it anew on every load, which takes 15 to 45 s. The conversion holds the same
float32 values.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hisparse.errors import ModelError
from hisparse.models.bars import without_bars
from hisparse.models.fetch import cache_directory, locked, partial_directory, say, sha256, usual_modes

_LAYOUT = 1  # part of the directory's name: raise it when the conversion itself changes


def check_gguf(path: Path) -> None:
    """Raise ModelError unless `path` is a complete GGUF file: its magic, its header and every tensor's bytes."""
    import gguf

    remedy = "fetch it again, or convert the model to GGUF anew"
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            magic = handle.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); give the path of a GGUF file") from None
    if magic != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it starts with {magic!r}, a GGUF file with b'GGUF'); {remedy}")
    try:
        reader = gguf.GGUFReader(str(path))
        end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
    except Exception as error:  # the reader fails in many ways on damaged bytes, none of them of use to a user
        raise ModelError(f"{path}: truncated or damaged GGUF ({size} bytes; {_first_line(error)}); {remedy}") from None
    if not reader.tensors:
        raise ModelError(f"{path}: a GGUF file without tensors (a vocabulary only?); {remedy}")
    if end > size:
        raise ModelError(f"{path}: truncated GGUF, {size} bytes of at least {end}; {remedy}")


def conversion_directory(path: Path, digest: str) -> Path:
    """Where the conversion of the GGUF file `path` with SHA-256 `digest` lies, whether it exists or not.

    Named after the content, so that a file replaced under the same name is converted anew.
    """
    return cache_directory() / f"{path.stem}-{digest[:16]}-v{_LAYOUT}"


def converted(path: Path) -> Path:
    """The safetensors directory of a GGUF file (float32, with tokenizer and chat template); converts on first use."""
    check_gguf(path)
    target = conversion_directory(path, sha256(path))
    if target.is_dir():
        return target
    with locked(target):
        if target.is_dir():  # another process was quicker
            return target
        say(f"Converting {path.name} (once; about half a minute) ...")
        with without_bars(), partial_directory(target) as partial:
            model, tokenizer = _read(path)
            try:
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                usual_modes(partial)
                os.rename(partial, target)
            except OSError as error:
                reason = error.strerror or _first_line(error)
                remedy = "free disk space, or set HISPARSE_CACHE to another disk"
                raise ModelError(f"{target}: cannot be written ({reason}); {remedy}") from None
    return target


def _read(path: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # unknown architectures and tokenizers surface as errors without a common base
        reason, remedy = _first_line(error), "use the model's safetensors directory instead"
        raise ModelError(f"{path}: transformers cannot read this GGUF ({reason}); {remedy}") from None
    # The weights are plain float32 now, but the model still says it is quantised and would refuse to be saved.
    model.is_quantized = False
    for owner, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    return model, tokenizer


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
