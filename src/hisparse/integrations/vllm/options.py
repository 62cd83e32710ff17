"""What the user asked for, and what HiSparse refuses, by name, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, InputError, UnsupportedError
from hisparse.integrations.vllm.layout import DEFAULT_TOKENS

CONNECTORS = ("HiSparseMetrics", "HiSparseClaims")
PER_KIND = """--attention-config '{"backend_per_kind": {"full_attention": "CUSTOM"}}'"""
"""How vLLM is told to leave layers with a sliding window to a backend of its own."""
DTYPES = ("auto", "float16", "bfloat16", "float32")
"""Values of --kv-cache-dtype."""
KEYS = ("hisparse", "hisparse_tlif", "hisparse_calibration", "hisparse_block_tokens")


@dataclass(frozen=True)
class Options:
    """Read from vLLM's ``--additional-config``.

    config: key `hisparse`, a path or the configuration itself; tlif, calibration: keys `hisparse_tlif` and
    `hisparse_calibration`, paths (those that ship with HiSparse are found by themselves); block_tokens: key
    `hisparse_block_tokens`, tokens that a vLLM block stands for.
    """

    config: HiSparseConfig
    tlif: Path | None = None
    calibration: Path | None = None
    block_tokens: int = DEFAULT_TOKENS

    @classmethod
    def read(cls, additional: Any) -> Options:
        """Options of an ``additional_config``. Raises ConfigError or InputError naming what is wrong."""
        given = dict(additional) if isinstance(additional, dict) else {}
        for key in given:
            if key.startswith("hisparse") and key not in KEYS:
                raise ConfigError(f'--additional-config: unknown key "{key}"; known keys: {", ".join(KEYS)}')
        value = given.get("hisparse", {})
        if isinstance(value, str):
            config = HiSparseConfig.load(value)
        elif isinstance(value, dict):
            config = HiSparseConfig(**value)
        else:
            raise ConfigError(f"--additional-config: hisparse = {value!r}; give a path, or the configuration's object")
        tokens = given.get("hisparse_block_tokens", DEFAULT_TOKENS)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ConfigError(f"--additional-config: hisparse_block_tokens = {tokens!r}; give a number such as 256")
        return cls(config, _path(given, "hisparse_tlif"), _path(given, "hisparse_calibration"), tokens)


def _path(given: dict[str, Any], key: str) -> Path | None:
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise ConfigError(f"--additional-config: {key} = {value!r}; give the path of a file")
    path = Path(value)
    if not path.is_file():
        raise InputError(f"--additional-config: {key} = {value}: no such file")
    return path


@dataclass(frozen=True)
class Asked:
    """What an engine is asked to do, as far as HiSparse may have to refuse it.

    kinds: of the attention of the model's layers; connector: name of the KV connector; one_group:
    ``--disable-hybrid-kv-cache-manager``.
    """

    hidden_size: int | None = None
    mla: bool = False
    kinds: frozenset[str] = frozenset()
    speculative: bool = False
    pipeline: int = 1
    decode_context: int = 1
    prefill_context: int = 1
    dual_batch: bool = False
    cache_dtype: str = "auto"
    connector: str | None = None
    one_group: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> Asked:
        """Read from vLLM's configuration."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        return cls(
            hidden_size=model.hf_text_config.hidden_size,
            mla=model.use_mla,
            kinds=frozenset(getattr(model.hf_text_config, "layer_types", None) or ()),
            speculative=vllm_config.speculative_config is not None,
            pipeline=parallel.pipeline_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
            prefill_context=getattr(parallel, "prefill_context_parallel_size", 1),
            dual_batch=getattr(parallel, "enable_dbo", False),
            cache_dtype=vllm_config.cache_config.cache_dtype,
            connector=getattr(vllm_config.kv_transfer_config, "kv_connector", None),
            one_group=vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        )

    def check(self, config: HiSparseConfig) -> None:
        """Raise UnsupportedError for what HiSparse cannot do, ConfigError for a model of another size."""
        if self.hidden_size is not None and config.hidden_size not in (None, self.hidden_size):
            raise ConfigError(
                f"hidden_size = {config.hidden_size}, but the model's weights have {self.hidden_size}; "
                "correct the configuration or choose the other model"
            )
        kinds = self.kinds - {"full_attention", "sliding_attention"}
        reasons = (
            (self.mla, "multi-head latent attention (MLA)", "HiSparse packs plain keys and values"),
            (bool(kinds), f"layers of kind {', '.join(sorted(kinds))}", "not tried beside HiSparse"),
            (self.speculative, "speculative decoding", "drop --speculative-config"),
            (self.pipeline > 1, f"pipeline parallelism ({self.pipeline})", "use --tensor-parallel-size"),
            (self.decode_context > 1, "decode context parallelism", "use --tensor-parallel-size"),
            (self.prefill_context > 1, "prefill context parallelism", "set it to 1"),
            (self.dual_batch, "dual batch overlap", "drop --enable-dbo"),
            (
                self.cache_dtype not in DTYPES,
                f"--kv-cache-dtype {self.cache_dtype}",
                "leave it out, for HiSparse packs by itself",
            ),
            (
                self.connector not in (None, *CONNECTORS),
                f"the KV connector {self.connector}",
                "it moves blocks without their rows in host memory; drop --kv-transfer-config and --kv-offloading-size",
            ),
            (
                self.one_group,
                "--disable-hybrid-kv-cache-manager",
                "drop it: the dense tail is a group of its own",
            ),
        )
        for found, what, remedy in reasons:
            if found:
                raise UnsupportedError(
                    f"{what} with --attention-backend CUSTOM (HiSparse): {remedy}, or use a stock backend"
                )


def refuse(vllm_config: Any, config: HiSparseConfig) -> None:
    """:meth:`Asked.check` of vLLM's configuration, of which attributes alone are read."""
    Asked.of(vllm_config).check(config)


def refuse_layer(
    alibi_slopes: Any,
    sliding_window: Any,
    logits_soft_cap: Any,
    attn_type: str,
    shared_with: Any,
    extra: dict[str, Any],
) -> None:
    """Raise UnsupportedError for a layer whose attention is not plain causal attention over its own keys."""
    reasons = (
        (alibi_slopes is not None, "ALiBi"),
        (sliding_window is not None, "a sliding window"),
        (bool(logits_soft_cap), "capped logits (soft cap)"),
        (attn_type != "decoder", f"{attn_type} attention"),
        (shared_with is not None, "keys and values shared with another layer"),
        (extra.get("sinks") is not None, "learned attention sinks"),
    )
    for found, what in reasons:
        if found:
            remedy = f"say {PER_KIND} in place of --attention-backend CUSTOM" if sliding_window is not None else ""
            remedy = remedy or "use a stock --attention-backend"
            raise UnsupportedError(f"a layer with {what}: HiSparse does not hold it; {remedy}")
