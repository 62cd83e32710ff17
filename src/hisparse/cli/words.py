"""Which word of `hisparse serve` names the model: the others are options of vLLM and their values."""

from __future__ import annotations

import re

from hisparse.errors import InputError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FLAGS = _names(
    """
    --aggregate-engine-logging --allow-credentials --allow-deprecated-quantization --async-scheduling
    --cohere-is-reasoning-model --cudagraph-metrics --data-parallel-external-lb --data-parallel-hybrid-lb
    --data-parallel-multi-port-external-lb --dcp-q-replicate --disable-cascade-attn --disable-chunked-mm-input
    --disable-custom-all-reduce --disable-fastapi-docs --disable-hybrid-kv-cache-manager --disable-log-stats
    --disable-nccl-for-dp-synchronization --disable-sliding-window --disable-uvicorn-access-log
    --enable-auto-tool-choice --enable-batch-sharded-sampling --enable-chunked-prefill --enable-cumem-allocator
    --enable-dbo --enable-elastic-ep --enable-ep-weight-filter --enable-eplb --enable-expert-parallel
    --enable-fault-tolerance --enable-flash-late-interaction --enable-flashinfer-autotune
    --enable-force-include-usage --enable-hc-sp --enable-layerwise-nvtx-tracing --enable-log-deltas
    --enable-log-outputs --enable-log-requests --enable-logging-iteration-details --enable-lora
    --enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint --enable-mfu-metrics
    --enable-mixed-moe-lora-format --enable-mm-embeds --enable-moe-shared-loras --enable-nccl-comm-suspend
    --enable-offline-docs --enable-per-request-metrics --enable-prefix-caching --enable-prompt-embeds
    --enable-prompt-tokens-details --enable-request-id-headers --enable-return-routed-experts --enable-scale-out
    --enable-server-load-tracking --enable-shm-tensor-arena --enable-sleep-mode --enable-ssl-refresh
    --enable-tokenizer-info-endpoint --enable-tower-connector-lora --enable-trace-replay --enforce-eager
    --exclude-tools-when-tool-choice-none --fail-on-environ-validation --fully-sharded-loras --grpc --headless --help
    --interleave-mm-strings --jit-monitor-verbose --kv-cache-metrics --kv-sharing-fast-prefill --language-model-only
    --log-error-stack --long-prefill-token-threshold-adaptive --mm-device-do-normalize --mm-encoder-only --numa-bind
    --ray-workers-use-nsight --return-sampling-mask --return-tokens-as-token-ids --scheduler-reserve-full-isl
    --skip-mm-profiling --skip-tokenizer-init --sleep-mode-offload-cudagraph --specialize-active-lora
    --swa-bounded-replay --tokens-only --trust-remote-code --trust-request-chat-template --trust-request-mm-kwargs
    --use-fp64-gumbel --use-replayssm --use-tqdm-on-load -dpe -dph -dpm -ep -h
    """
)
"""vLLM's options without a value; those that begin with --no- are left out."""

SEVERAL = _names(
    """
    --allowed-media-domains --api-key --collect-detailed-traces --cpu-offload-params --cudagraph-capture-sizes
    --ignore-patterns --kv-cache-dtype-skip-layers --logits-processors --lora-modules --lora-target-modules
    --numa-bind-cpus --numa-bind-nodes --offload-params --served-model-name --sleep-preserve-parameter-names
    """
)
"""vLLM's options of one value or more. Any other option has one."""


def take_model(words: list[str]) -> tuple[str | None, list[str]]:
    """The word that names the model, and the other words in their order; None where there is none.

    Raises InputError for a second such word, and for `--model`, which vLLM would serve in place of ours.
    """
    model: str | None = None
    others: list[str] = []
    values = 0.0  # words that may still belong to the option before
    for word, following in zip(words, [*words, "MODEL"][1:], strict=True):
        if re.match(r"--?[A-Za-z]", word):
            name, equals, value = word.partition("=")
            if name == "--model":
                value = value if equals else following
                raise InputError(f"--model {value}: leave --model out, the model is a word of its own: serve {value}")
            values = 0 if equals else _values(name)
        elif values > 0:
            values -= 1
        elif model is None:
            model = word
            continue
        else:
            raise InputError(
                f"{word}: one model is served, and {model} is given already; leave {word} out, or put it right behind "
                "its option"
            )
        others.append(word)
    return model, others


def _values(name: str) -> float:
    """How many words may follow an option of vLLM as its values."""
    name = name.replace("_", "-") if name.startswith("--") else name
    if name in FLAGS or (name.startswith("--no-") and f"--{name[5:]}" in FLAGS) or re.fullmatch(r"-O\w+", name):
        return 0
    return float("inf") if name in SEVERAL else 1
