"""What `hisparse serve` can refuse before vLLM starts, by the command's words and the checkpoint's configuration.

The engine refuses the same and more, but half a minute later and from within another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hisparse.errors import ConfigError, InputError, ModelError, UnsupportedError

if TYPE_CHECKING:
    from hisparse.config import HiSparseConfig
    from hisparse.integrations.vllm.layout import BlockLayout

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
}
"""vLLM's short names of options that are looked at here."""

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""As vLLM reads them."""

DTYPES = {"float32": "float32", "float": "float32", "float16": "float16", "half": "float16", "bfloat16": "bfloat16"}
"""Values of --dtype but auto, and the dtypes that they stand for."""

HUB_SECONDS = 10
"""How long the hub may take to answer whether it has a model."""


def read_words(words: list[str]) -> dict[str, str]:
    """Options of a vLLM command by their long names, "" for those without a value; of one given twice, the last."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if not equals and not re.match(r"--?[A-Za-z]", following):
            value = following
        found[SHORT.get(name, name)] = value
    return found


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's configuration says of its text model; nothing where it is not on this machine.

    source: a directory or a hub id.
    """

    source: str
    text: Mapping[str, Any]

    @classmethod
    def of(cls, source: str) -> Checkpoint:
        path = Path(source) / "config.json"
        if not path.is_file():
            found = _downloaded(source)
            if found is None:
                return cls(source, {})
            path = found
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read ({error}); fetch the model again") from None
        if not isinstance(values, dict):
            raise InputError(f"{path}: holds a {type(values).__name__}, not an object; fetch the model again")
        with contextlib.suppress(Exception):  # a kind of model that transformers does not know: what the file says
            from transformers import AutoConfig

            # Fills in what the file leaves out, such as the kinds of layers.
            values = AutoConfig.from_pretrained(path.parent, local_files_only=True).to_dict()
        inner = values.get("text_config")
        return cls(source, {**values, **inner} if isinstance(inner, dict) else values)

    def number(self, *names: str) -> int:
        """The first of these that is a positive whole number; 0 for none."""
        found = (self.text.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), 0)

    @property
    def kinds(self) -> tuple[str, ...]:
        found = self.text.get("layer_types")
        return tuple(map(str, found)) if isinstance(found, list | tuple) else ()

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.number("num_key_value_heads", "num_attention_heads")

    @property
    def head_dim(self) -> int:
        return self.number("head_dim") or self.number("hidden_size") // max(self.number("num_attention_heads"), 1)

    @property
    def cache_dtype(self) -> str:
        """What the checkpoint wants keys and values stored in where --kv-cache-dtype is auto: fp8, say, or auto.

        llm-compressor and ModelOpt write it down beside how they quantised the weights.
        """
        found = self.text.get("quantization_config")
        if not isinstance(found, Mapping):
            return "auto"
        method, inner = str(found.get("quant_method")), found.get("quantization")
        if method == "compressed-tensors":
            return "fp8" if isinstance(found.get("kv_cache_scheme"), Mapping) else "auto"
        algorithm = (inner if isinstance(inner, Mapping) else found).get("kv_cache_quant_algo")
        named = str(algorithm).lower()
        return named if method.startswith("modelopt") and named in ("fp8", "nvfp4") else "auto"

    @property
    def mixed(self) -> bool:
        """Whether some layers see everything and others do not."""
        return any(kind != "full_attention" for kind in self.kinds)

    def check_layers(self, options: Mapping[str, str]) -> None:
        """Raise UnsupportedError where no layer is one that HiSparse can hold."""
        from hisparse.integrations.vllm.options import refuse_layer

        text = self.text
        if self.kinds and "full_attention" not in self.kinds:
            windows = set(self.kinds) == {"sliding_attention"}
        else:
            windows = not self.kinds and bool(text.get("sliding_window"))
            windows = windows and text.get("use_sliding_window") is not False
            windows = windows and "--disable-sliding-window" not in options
        if windows:
            raise UnsupportedError(
                f"{self.source}: a sliding window of {text.get('sliding_window')} tokens in every layer: HiSparse has "
                "nothing to pack; use `vllm serve` with a stock backend"
            )
        attention = text.get("attn_config")
        alibi = text.get("alibi") or (isinstance(attention, Mapping) and attention.get("alibi"))
        alibi = alibi or text.get("model_type") == "bloom"
        kind = "encoder_decoder" if text.get("is_encoder_decoder") else "decoder"
        sinks = {"sinks": True} if text.get("model_type") == "gpt_oss" or text.get("attention_sinks") is True else {}
        refuse_layer(alibi or None, None, text.get("attn_logit_softcapping"), kind, None, sinks)

    def check_length(self, options: Mapping[str, str]) -> int:
        """The greatest length of a request; 0 where it is not known yet. Raises InputError for an impossible one."""
        window = self.number("max_position_embeddings")
        given = options.get("--max-model-len")
        if given is None or given.strip().lower() in ("auto", "-1"):
            return window
        length = _amount(given)
        if not length:
            raise InputError(f"--max-model-len {given}: give a number of tokens such as 131072, 128K or auto")
        # Rotary scaling and what else may widen the window is left to vLLM.
        rope = text if isinstance(text := self.text.get("rope_parameters"), Mapping) else {}
        plain = rope.get("rope_type", "default") == "default" and not self.text.get("rope_scaling")
        plain = plain and not self.text.get("model_max_length")
        plain = plain and not any(name.split(".")[0] == "--hf-overrides" for name in options)
        if 0 < window < length and plain and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") == "0":
            raise InputError(
                f"--max-model-len {given}: the model was made for {window} tokens; give at most that many, or say "
                f"--hf-overrides '{{\"max_position_embeddings\": {length}}}' if you know that it reads more"
            )
        return length


def _amount(text: str) -> int | None:
    """A whole number as vLLM reads one, such as 4096, 4K or 1.5k; None for anything else."""
    number = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([kKmMgGtT]?)", text.strip())
    if number is None or ("." in number[1] and number[2] not in ("k", "m", "g", "t")):
        return None
    return int(Fraction(number[1]) * UNITS.get(number[2], 1))


def _downloaded(source: str) -> Path | None:
    """The configuration of a model of the hub that was downloaded before."""
    if not find_spec("huggingface_hub"):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(source, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def check_source(source: str, options: Mapping[str, str]) -> None:
    """Raise ModelError for a model of the hub that is not on this machine and that the hub does not give.

    Asks the hub once: vLLM would ask it again and again, and end in a trace of calls.
    """
    if Path(source).is_dir() or ":" in source or os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    if "--revision" in options or _downloaded(source):
        return
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if HF_HUB_OFFLINE:
        raise ModelError(
            f"{source}: not on this machine, and HF_HUB_OFFLINE is set: only what was downloaded before can be served; "
            "check the spelling, unset it, or give a local directory"
        )
    try:
        HfApi().model_info(source, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        if "--hf-token" in options:
            return
        reason = "the hub has no such model, or not without a token"
    except HfHubHTTPError:
        return  # a hub that answers in another way, a mirror for instance: vLLM may get on with it
    except Exception as error:  # of the network or of names: they have no common base
        reason = f"the hub did not give it ({' '.join(str(error).split())[:240] or type(error).__name__})"
    else:
        return
    raise ModelError(
        f"{source}: no directory of that name, not on this machine, and {reason}; check the spelling and the "
        "connection, give a local directory, or leave the model out for the default one"
    )


def check_options(options: Mapping[str, str], config: HiSparseConfig, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError, ConfigError or InputError for what the engine would refuse by its configuration."""
    from hisparse.integrations.vllm.options import Asked

    cache_dtype = options.get("--kv-cache-dtype", "auto")
    Asked(
        hidden_size=checkpoint.number("hidden_size") or None,
        mla=bool(checkpoint.text.get("kv_lora_rank")),
        kinds=frozenset(checkpoint.kinds),
        speculative=any(name.startswith(("--speculative-config", "--spec-")) for name in options),
        pipeline=count(options, "--pipeline-parallel-size"),
        decode_context=count(options, "--decode-context-parallel-size"),
        prefill_context=count(options, "--prefill-context-parallel-size"),
        diffusion=_given(options, "--diffusion-config"),
        dual_batch="--enable-dbo" in options or count(options, "--ubatch-size", 0) > 1,
        cache_dtype=checkpoint.cache_dtype if cache_dtype == "auto" else cache_dtype,
        dtype=DTYPES.get(options.get("--dtype", "")),
        connector="OffloadingConnector" if "--kv-offloading-size" in options else _connector(options),
        one_group="--disable-hybrid-kv-cache-manager" in options,
        sleep=not options.keys().isdisjoint(("--enable-sleep-mode", "--enable-cumem-allocator")),
        elastic="--enable-elastic-ep" in options,
    ).check(config)
    checkpoint.check_layers(options)


def count(options: Mapping[str, str], name: str, least: int = 1) -> int:
    """A whole number from `least` on, `least` where it is not given."""
    value = options.get(name, str(least))
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < least:
        raise InputError(f"{name} {value}: give a whole number from {least} on")
    return int(value)


def _given(options: Mapping[str, str], name: str) -> bool:
    """Whether an option that holds an object is given, whole or a key of it."""
    return any(option.split(".")[0] == name for option in options)


def _connector(options: Mapping[str, str]) -> str | None:
    given = options.get("--kv-transfer-config.kv_connector", options.get("--kv-transfer-config.kv-connector"))
    text = options.get("--kv-transfer-config")
    if text is None:
        return given
    try:
        value = json.loads(text)
        return value.get("kv_connector") if isinstance(value, dict) else None
    except ValueError as error:
        raise InputError(f"--kv-transfer-config {text}: not JSON ({error}); leave it out for HiSparse's own") from None


def check_layout(
    options: Mapping[str, str], config: HiSparseConfig, checkpoint: Checkpoint, block_tokens: int, ranks: int
) -> BlockLayout | None:
    """The layout of the engine's blocks, hot buffers aside; None where the model's dimensions are not known here.

    Raises InputError for an impossible length and for less KV memory than a request takes, ConfigError or FormatError
    where blocks cannot be cut into pages.
    """
    memory = options.get("--kv-cache-memory-bytes")
    if memory is not None and _amount(memory) is None:
        raise InputError(f"--kv-cache-memory-bytes {memory}: give a number of bytes such as 4000000000, 4g or 4G")
    length = checkpoint.check_length(options)
    if not checkpoint.heads or not checkpoint.head_dim or not length:
        return None
    import torch

    from hisparse.integrations.vllm.layout import choose_layout

    heads = max(1, checkpoint.heads // ranks)
    dtype = {"float32": torch.float32, "float": torch.float32}.get(options.get("--dtype", ""), torch.bfloat16)
    layout = choose_layout(config, heads, checkpoint.head_dim, dtype, length, block_tokens)
    _check_memory(options, checkpoint, layout, length)
    return layout


def _check_memory(options: Mapping[str, str], checkpoint: Checkpoint, layout: BlockLayout, length: int) -> None:
    """Raise InputError where --kv-cache-memory-bytes do not hold one request of `length` tokens.

    What layers with a window, and on a GPU hot buffers, take besides is left to the engine.
    """
    given = options.get("--kv-cache-memory-bytes", "0")
    memory = _amount(given)
    if not memory or "--num-gpu-blocks-override" in options:  # 0 bytes are as many as vLLM finds
        return
    if options.get("--max-model-len", "").strip().lower() in ("auto", "-1"):
        length = 1  # vLLM shortens it to what fits
    layers = checkpoint.kinds.count("full_attention") or checkpoint.number("num_hidden_layers")
    need = layers * layout.block_bytes * (layout.blocks(length) + 1)  # one block stands for none
    if memory < need:
        shorter = "" if length == 1 else ", make --max-model-len smaller"
        raise InputError(
            f"--kv-cache-memory-bytes {given}: one request of {length} token{'s' * (length > 1)} takes {need} bytes of "
            f"KV memory on each rank; give at least as many{shorter}, or leave the option out"
        )


def _check_apart(folder: Path, files: Mapping[str, Path | None]) -> None:
    """vLLM reads all safetensors files in a folder as weights where no index says which are."""
    if not folder.is_dir() or any(folder.glob("*.safetensors.index.json")):
        return
    for option, file in files.items():
        if file is not None and file.suffix == ".safetensors" and file.resolve().parent == folder.resolve():
            raise InputError(
                f"{option} {file}: vLLM would read it as weights, for it lies in the model's folder; move it elsewhere"
            )


def check_companions(
    config: HiSparseConfig, checkpoint: Checkpoint, tlif: Path | None, calibration: Path | None, gpu: bool
) -> None:
    """Raise ModelError for files of another model, InputError for files among its weights; on a GPU ConfigError where
    there is no calibration.

    Looks at nothing where the weights are not on this machine.
    """
    _check_apart(Path(checkpoint.source), {"--tlif": tlif, "--calibration": calibration})
    if tlif is not None and checkpoint.kinds and checkpoint.kinds[0] != "full_attention":
        raise UnsupportedError(
            f"--tlif {tlif}: a TLIF reads the values of the model's first layer, which has another backend here; leave "
            "it out"
        )
    if tlif is None and calibration is None and not (gpu and config.vtq.enable_per_block_quant):
        return
    from hisparse.identity import ModelIdentity, embedding_sample
    from hisparse.integrations.vllm.companions import find_embedding
    from hisparse.tlif.store import scorer_for
    from hisparse.vtq.calibration import calibration_for

    weight = find_embedding(checkpoint.source) if checkpoint.heads and checkpoint.head_dim else None
    if weight is None:
        return
    identity = ModelIdentity(
        model_type=str(checkpoint.text.get("model_type")),
        hidden_size=checkpoint.number("hidden_size"),
        layers=checkpoint.number("num_hidden_layers"),
        heads=checkpoint.number("num_attention_heads"),
        kv_heads=checkpoint.heads,
        head_dim=checkpoint.head_dim,
        vocab_size=int(weight.shape[0]),
        sample=embedding_sample(weight),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine says which scorer it takes
        scorer_for(identity, config.tlif, tlif)
    if calibration_for(identity, calibration) is None and gpu:
        raise ConfigError(
            f"{checkpoint.source}: no calibration for this model, which a GPU needs before the first token: make one "
            "with `hisparse calibrate` and give it with --calibration FILE"
        )
