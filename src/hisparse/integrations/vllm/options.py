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

    kinds: of the attention of the model's layers; states: some layers keep a state in place of keys and values;
    dtype: the model's, as in "bfloat16", None where it is not known; connector: name of the KV connector; one_group:
    ``--disable-hybrid-kv-cache-manager``; sleep: memory may be taken away between requests; idle_steps: on a GPU, data
    parallel ranks under vLLM's first model runner, which repeats a rank's last block tables while it has nothing to do.
    """

    hidden_size: int | None = None
    mla: bool = False
    kinds: frozenset[str] = frozenset()
    states: bool = False
    speculative: bool = False
    diffusion: bool = False
    pipeline: int = 1
    decode_context: int = 1
    prefill_context: int = 1
    dual_batch: bool = False
    cache_dtype: str = "auto"
    dtype: str | None = None
    connector: str | None = None
    one_group: bool = False
    sleep: bool = False
    elastic: bool = False
    idle_steps: bool = False

    @classmethod
    def of(cls, vllm_config: Any) -> Asked:
        """Read from vLLM's configuration."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        on_cpu = vllm_config.device_config.device_type == "cpu"  # where idle ranks compute no attention
        return cls(
            hidden_size=model.hf_text_config.hidden_size,
            mla=model.use_mla,
            kinds=frozenset(getattr(model.hf_text_config, "layer_types", None) or ()),
            states=model.is_hybrid,
            speculative=vllm_config.speculative_config is not None,
            diffusion=vllm_config.diffusion_config is not None,
            pipeline=parallel.pipeline_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
            prefill_context=getattr(parallel, "prefill_context_parallel_size", 1),
            dual_batch=parallel.use_ubatching,
            cache_dtype=vllm_config.cache_config.cache_dtype,
            dtype=str(model.dtype).removeprefix("torch."),
            connector=getattr(vllm_config.kv_transfer_config, "kv_connector", None),
            one_group=vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
            sleep=model.enable_sleep_mode or model.enable_cumem_allocator,
            elastic=parallel.enable_elastic_ep,
            idle_steps=parallel.data_parallel_size > 1 and not on_cpu and not vllm_config.use_v2_model_runner,
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
            (self.states, "layers that keep a state (Mamba, linear attention)", "not tried beside HiSparse"),
            (self.speculative, "speculative decoding", "drop --speculative-config"),
            (self.diffusion, "a diffusion model", "drop --diffusion-config: it rewrites tokens that are packed"),
            (self.pipeline > 1, f"pipeline parallelism ({self.pipeline})", "use --tensor-parallel-size"),
            (self.decode_context > 1, "decode context parallelism", "use --tensor-parallel-size"),
            (self.prefill_context > 1, "prefill context parallelism", "set it to 1"),
            (self.dual_batch, "dual batch overlap", "drop --enable-dbo and --ubatch-size"),
            (self.elastic, "elastic expert parallelism", "drop --enable-elastic-ep"),
            (
                self.idle_steps,
                "data parallelism of a model of experts under vLLM's first model runner",
                "its idle ranks would write over dense tokens; let vLLM take the second one, drop --data-parallel-size",
            ),
            (
                self.sleep,
                "sleep mode",
                "its hot buffers and rows would not sleep; drop --enable-sleep-mode and --enable-cumem-allocator",
            ),
            (
                self.cache_dtype not in DTYPES,
                f"--kv-cache-dtype {self.cache_dtype}",
                "leave it out, for HiSparse packs by itself; where the checkpoint asks for it, say the model's dtype",
            ),
            (
                self.dtype is not None and self.cache_dtype not in ("auto", self.dtype),
                f"--kv-cache-dtype {self.cache_dtype} for a model in {self.dtype}",
                "leave it out, for HiSparse packs by itself, or say the same --dtype",
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
    """Raise UnsupportedError for a layer whose attention is not plain causal attention over its own keys.

    extra: what else the model hands to a backend, which changes attention wherever it is given.
    """
    off = [name for name, value in extra.items() if value is None or (isinstance(value, int) and value in (0, -1))]
    others = sorted(extra.keys() - {"sinks", *off})
    reasons = (
        (alibi_slopes is not None, "ALiBi"),
        (sliding_window is not None, "a sliding window"),
        (bool(logits_soft_cap), "capped logits (soft cap)"),
        (attn_type != "decoder", f"{attn_type} attention"),
        (shared_with is not None, "keys and values shared with another layer"),
        (extra.get("sinks") is not None, "learned attention sinks"),
        (bool(others), f"{', '.join(others)} given"),
    )
    for found, what in reasons:
        if found:
            remedy = f"say {PER_KIND} in place of --attention-backend CUSTOM" if sliding_window is not None else ""
            remedy = remedy or "use a stock --attention-backend"
            raise UnsupportedError(f"a layer with {what}: HiSparse does not hold it; {remedy}")
