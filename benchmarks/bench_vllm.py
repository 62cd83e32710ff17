"""HiSparse beside vLLM's own KV cache, each in an engine of its own: what fits, prefill, milliseconds a token, answers.

    python benchmarks/bench_vllm.py --model DIRECTORY --kv stock hisparse --context 2048 --needles docs/*.md
    python benchmarks/bench_vllm.py --shape glm4-9b-1m --kv bfloat16 fp8 hisparse --context 4096 131072 --out FILE

`--model` serves real weights, `--shape` random ones of a named shape. A row a context and batch::

    {"kv", "shape", "context", "batch", "ms_per_token", "prefill_s", "kv_tokens", "gpu_kv_bytes", "host_bytes"}

With `--claim` nothing is prefilled but a prompt's last tokens: `prefill_s` then says little, and rates at a million
tokens can be measured in a minute. With `--needles` (a real model) a row says how many facts of those hidden in
documents of its context's length were found; with `--together N` of so many documents, read and asked about all at
once, chunks of some (`--batched-tokens`) beside others that decode. With `--profile` it is followed by the kernels of a
few steps of the same kind, and by the microseconds from one layer's first kernel to the next one's.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hisparse.bench.shapes import shape_of

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions of this file are sent to the ranks

INTERMEDIATE = {
    "glm4-9b-1m": 13696,
    "llama3.1-8b": 14336,
    "qwen2.5-7b-1m": 18944,
    "qwen2.5-72b": 29568,
    "qwen2.5-0.5b": 4864,
}
"""Width of the feed-forward layers of the shapes of `hisparse bench`."""
CLAIMS = {
    "hisparse": {
        "kv_connector": "HiSparseClaims",
        "kv_role": "kv_both",
        "kv_connector_module_path": "hisparse.integrations.vllm.claims",
        "kv_connector_extra_config": {"key_std": 1.0},
    },
    "stock": {
        "kv_connector": "DecodeBenchConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"fill_std": 1.0, "startup_fill": True},
    },
}
VOCABULARY = 32000
STEPS = 64
PROFILED = 4
"""Steps that are profiled together."""
WARM = 20000
"""Tokens of a prompt that is read before the measured one."""


def shape_directory(name: str, context: int) -> str:
    """A directory with the configuration of a Llama of a named shape."""
    shape = shape_of(name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.dim,
        "hidden_size": shape.hidden,
        "intermediate_size": INTERMEDIATE[name],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def start(kv: str, arguments: argparse.Namespace) -> Any:
    """An engine. `kv`: stock, a dtype of vLLM's cache, hisparse, or hisparse:FILE with a configuration."""
    from vllm import LLM

    longest = max(arguments.context) + STEPS + 3
    options: dict[str, Any] = {"dtype": arguments.dtype, "max_model_len": longest, "seed": 0}
    options.update(max_num_seqs=max(arguments.batch), enable_prefix_caching=bool(arguments.needles))
    options["enforce_eager"] = arguments.eager
    if arguments.batched_tokens:
        options["max_num_batched_tokens"] = arguments.batched_tokens
    if arguments.uncompiled:
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    options["tensor_parallel_size"] = arguments.tensor_parallel
    if arguments.utilisation:
        options["gpu_memory_utilization"] = arguments.utilisation
    if arguments.kv_memory:
        options["kv_cache_memory_bytes"] = arguments.kv_memory
    if arguments.blocks and kv.startswith("hisparse"):
        options["num_gpu_blocks_override"] = arguments.blocks
    if arguments.shape:
        options.update(model=shape_directory(arguments.shape, longest), load_format="dummy", skip_tokenizer_init=True)
    else:
        options["model"] = arguments.model
    if kv.startswith("hisparse"):
        file = kv.partition(":")[2]
        options.update(attention_backend="CUSTOM", additional_config={"hisparse": file or {}})
    elif kv != "stock":
        options["kv_cache_dtype"] = kv
    if arguments.claim:
        options["kv_transfer_config"] = CLAIMS["hisparse" if kv.startswith("hisparse") else "stock"]
    llm = LLM(**options)
    if arguments.shape:
        llm.apply_model(partial(spread, drift=arguments.drift))
    return llm


def spread(model: Any, drift: float) -> None:
    """Give a model of random weights scores that are spread as a model's are, and queries that drift.

    vLLM's own random weights are so small that all attention is uniform. All tokens' embeddings share a direction, so
    that neighbouring steps want rows in common; `drift` is the part that is a token's own. What the layers add is as
    much in all as the embedding, else later ones would drift more. A benchmark's rows say which share of the rows was
    found in the hot buffer: a drift of 0.1 was chosen because some 80 % are, at 1M tokens.
    """
    import torch

    generator: dict[Any, Any] = {}
    added = (2 * len(model.model.layers)) ** -0.5
    for name, weight in model.named_parameters():
        make = generator.setdefault(weight.device, torch.Generator(weight.device).manual_seed(0))
        if weight.dim() < 2:
            weight.data.fill_(1.0)
        elif "embed_tokens" in name:
            common = torch.randn(weight.shape[1], generator=make, device=weight.device)
            weight.data.normal_(0.0, drift, generator=make).add_(common * (1 - drift**2) ** 0.5)
        else:
            scale = added if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weight.data.normal_(0.0, scale * weight.shape[-1] ** -0.5, generator=make)


def stop(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: list[list[int]], new: int) -> list[list[float]]:
    """When each request's tokens came: seconds since all were handed in, a list a request."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    names = [f"{time.monotonic_ns()}-{i}" for i in range(len(prompts))]
    came: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            known = came[output.request_id]
            known += [now] * (len(output.outputs[0].token_ids) - len(known))
    return list(came.values())


def measure(llm: Any, context: int, batch: int, claim: bool) -> dict[str, float]:
    """prefill_s: until every request has a token; ms_per_token: median of the time between a request's tokens, once
    all of them decode. Raises SystemExit where what the engine computes is not finite."""
    draw = random.Random(context)

    def prompts(number: int, length: int) -> list[list[int]]:
        """New ones each time: nothing is found in a prefix cache."""
        return [[draw.randrange(10, VOCABULARY) for _ in range(length)] for _ in range(number)]

    # Kernels are compiled when they are first used: short and long prompts, and steps of so many requests, come first.
    generate(llm, prompts(1, 64), 4)
    if not claim:
        generate(llm, prompts(1, min(context, WARM)), 4)
    before = hot_counts(llm)
    # Whole blocks can be claimed; one token remains to be computed.
    timed = prompts(batch, context + claim)
    came = generate(llm, timed, 1 + STEPS)
    first = max(times[0] for times in came)
    gaps = [b - a for times in came for a, b in pairwise(times) if a >= first]
    found = {"prefill_s": round(first, 4), "ms_per_token": round(statistics.median(gaps) * 1e3, 4)}
    hits, misses = (now - then for now, then in zip(hot_counts(llm), before, strict=True))
    check(llm, timed if claim or context <= WARM else prompts(1, WARM))
    return {**found, "hot_hit_rate": round(hits / (hits + misses), 4)} if hits + misses else found


def check(llm: Any, prompts: list[list[int]]) -> None:
    """Raise SystemExit unless the tokens behind such prompts have finite probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = [entry.logprob for output in outputs for step in output.outputs[0].logprobs for entry in step.values()]
    if not all(map(math.isfinite, found)):
        raise SystemExit(f"no speed is reported: behind {len(prompts[0])} tokens, probabilities are not finite")


def profile(llm: Any, context: int, batch: int, claim: bool) -> None:
    """Print where the device's time goes in a few decode steps of such requests."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record
    from vllm import SamplingParams

    engine, draw = llm.llm_engine, random.Random(context + 1)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    for i in range(batch):
        prompt = [draw.randrange(10, VOCABULARY) for _ in range(context + claim)]
        engine.add_request(f"{time.monotonic_ns()}-{i}", {"prompt_token_ids": prompt}, params)
    for _ in range(STEPS // 2):
        engine.step()
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step()
    events = [event for event in recorded.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name.split("(")[0][-70:]].append(event.time_range.elapsed_us())
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:24]:
        mean = sum(each) / len(each)
        print(f"  {sum(each) / PROFILED / 1e3:8.3f} ms a step, {len(each) / PROFILED:6.1f} of {mean:7.1f} us  {name}")
    starts = [event.time_range.start for event in events if event.name.startswith("weigh_queries")]
    print("  from layer to layer, us:", [round(b - a, 1) for a, b in pairwise(starts)][: len(starts) // PROFILED])


def counted(model: Any = None) -> dict[str, float]:
    """What HiSparse counts and holds on one rank; empty for other engines."""
    from hisparse.errors import FormatError
    from hisparse.integrations.vllm.backend import current_runtime

    try:
        runtime = current_runtime()
        found = runtime.statistics()
    except FormatError:
        return {}
    return {**found, "block_bytes": runtime.layout.block_bytes * len(runtime.layers), "tokens": runtime.layout.tokens}


def hot_counts(llm: Any) -> tuple[float, float]:
    """Rows found in HiSparse's hot buffers so far, and rows read from the host; 0 for other engines."""
    found = llm.apply_model(counted)
    return sum(x.get("hot_hits", 0) for x in found), sum(x.get("hot_misses", 0) for x in found)


def memory(llm: Any, kv: str) -> dict[str, int]:
    """Tokens that fit, and bytes of all ranks."""
    cache = llm.llm_engine.vllm_config.cache_config
    found = {"kv_tokens": int(cache.kv_cache_size_tokens or 0), "gpu_kv_bytes": 0, "host_bytes": 0}
    if kv.startswith("hisparse"):
        ranks = llm.apply_model(counted)
        # Blocks may be fewer (--blocks) because host memory is: what the device would hold.
        free = llm.llm_engine.engine_core.engine_core.available_gpu_memory_for_kv_cache
        found["device_tokens"] = max(0, int(free)) // int(ranks[0]["block_bytes"]) * int(ranks[0]["tokens"])
        found["gpu_kv_bytes"], found["host_bytes"] = (
            int(sum(rank[name] for rank in ranks)) for name in ("device_bytes", "host_bytes")
        )
    else:
        found["gpu_kv_bytes"] = int(sum(llm.apply_model(stock_bytes)))
    return found


def stock_bytes(model: Any) -> int:
    """Bytes of vLLM's own KV cache on one rank."""
    from vllm.model_executor.layers.attention import Attention

    return sum(layer.kv_cache.nbytes for layer in model.modules() if isinstance(layer, Attention))


def needles(llm: Any, files: list[Path], context: int, together: int) -> str:
    """Needles found of those hidden, each asked for after its document was read; or (together: how many documents) all
    asked for at once."""
    from vllm import SamplingParams

    from hisparse.evaluate.needles import build_contexts, prompt_parts

    tokenizer = llm.get_tokenizer()
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    found = asked = 0
    greedy = SamplingParams(temperature=0.0, max_tokens=24 if together else 8)
    if together:
        made = build_contexts(tokenizer, text, "single", context - 64, together)
        parts = [prompt_parts(tokenizer, each.document, each.needles[0].key) for each in made]
        prompts = [{"prompt_token_ids": document + question} for document, question in parts]
        answers = [output.outputs[0].text for output in llm.generate(prompts, greedy, use_tqdm=False)]
        found = sum(each.needles[0].value in text for each, text in zip(made, answers, strict=True))
        return f"{found} of {together}"
    for kind, count in (("single", 6), ("multi_key", 3)):
        for made in build_contexts(tokenizer, text, kind, context - 64, count):  # type: ignore[arg-type]
            generate(llm, [prompt_parts(tokenizer, made.document)[0]], 1)
            for needle in made.needles:
                document, question = prompt_parts(tokenizer, made.document, needle.key)
                (output,) = llm.generate([{"prompt_token_ids": document + question}], greedy, use_tqdm=False)
                found, asked = found + (needle.value in output.outputs[0].text), asked + 1
    return f"{found} of {asked}"


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """A results file, after each row: a run that ends early loses nothing."""
    import torch
    import vllm

    from hisparse.evaluate.environment import environment

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = {**environment(device), "vllm": vllm.__version__}
    out.write_text(json.dumps({**record, "command": sys.argv[1:], "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="directory or hub id")
    source.add_argument("--shape", choices=INTERMEDIATE)
    parser.add_argument("--kv", nargs="+", default=["stock", "hisparse"])
    parser.add_argument("--context", nargs="+", type=int, default=[4096])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-memory", type=int, help="bytes of the KV pool; on a CPU it has to be given")
    parser.add_argument("--utilisation", type=float, help="of the device's memory, instead of --kv-memory")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--blocks", type=int, help="HiSparse's blocks, where the host pool is what limits them")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, no compilation")
    parser.add_argument("--uncompiled", action="store_true", help="CUDA graphs of decode steps only: starts sooner")
    parser.add_argument("--claim", action="store_true", help="no prefill: random KV stands for the prompt's")
    parser.add_argument("--drift", type=float, default=0.1, help="of a shape: how much queries differ between tokens")
    parser.add_argument("--needles", nargs="*", type=Path, default=[], help="texts to hide facts in")
    parser.add_argument("--together", type=int, default=0, metavar="N", help="ask for N facts at once")
    parser.add_argument("--batched-tokens", type=int, help="tokens of a step at most")
    parser.add_argument("--profile", action="store_true", help="print the kernels of some steps of each row")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.out is not None and not arguments.out.absolute().parent.is_dir():
        parser.error(f"--out {arguments.out}: no such folder; give a file in one that exists")
    if arguments.together and not arguments.needles:
        parser.error(f"--together {arguments.together}: give texts to hide facts in with --needles")
    if arguments.profile:
        import torch

        if not torch.cuda.is_available():
            parser.error("--profile: PyTorch finds no CUDA device here; leave it out")

    rows = []
    for kv in arguments.kv:
        llm = start(kv, arguments)
        for context in arguments.context:
            asked = arguments.needles
            answers = {"needles": needles(llm, asked, context, arguments.together)} if asked else {}
            for batch in arguments.batch:
                row = {"kv": kv, "shape": arguments.shape or arguments.model, "context": context, "batch": batch}
                row["tensor_parallel"] = arguments.tensor_parallel
                rows.append({**row, **answers, **measure(llm, context, batch, arguments.claim), **memory(llm, kv)})
                print(json.dumps(rows[-1]), flush=True)
                if arguments.out is not None:
                    write(arguments.out, rows)
                if arguments.profile:
                    profile(llm, context, batch, arguments.claim)
        stop(llm)


if __name__ == "__main__":
    main()
