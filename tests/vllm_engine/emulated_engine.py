"""emulated_engine.py FOLDER SCENARIOS: engines on a CPU that run what a GPU would run, every operation compared.

SCENARIOS: a list of `engine_scenarios.Scenario` in JSON, or "drawn SEED NUMBER SECONDS". FOLDER gets small random
models and compiled kernels, which stay. Prints a line in JSON for each scenario, then one of what was launched and
compared. See `gpu_on_cpu` and `checked_ops`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import gpu_on_cpu
from engine_scenarios import Scenario, drawn
from gpu_on_cpu import LAUNCHED, Way

VOCABULARY = 512


def model_files(folder: Path, queries: int) -> tuple[Path, Path]:
    """A random Llama of two layers with two KV heads of 64 and `queries` query heads each, and its calibration."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from hisparse.identity import ModelIdentity
    from hisparse.vtq.calibration import calibrate, save_calibration

    here, calibration = folder / f"llama-{queries}", folder / f"llama-{queries}.calibration.safetensors"
    if not calibration.exists():
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
        config = LlamaConfig(
            **sizes, num_attention_heads=2 * queries, num_key_value_heads=2, num_hidden_layers=2,
            max_position_embeddings=4096, initializer_range=0.1,
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(here)
        make = torch.Generator().manual_seed(2)
        windows = [torch.randint(0, VOCABULARY, (256,), generator=make) for _ in range(4)]
        stats = calibrate(model, windows)
        save_calibration(calibration, stats, ModelIdentity.of(model), "random tokens")
    return here, calibration


def prompts(scenario: Scenario) -> list[list[int]]:
    made: list[list[int]] = []
    rng = random.Random(scenario.seed)
    for asked in scenario.requests:
        ids = [rng.randrange(VOCABULARY) for _ in range(asked.length)]
        if asked.like is not None:
            other = made[asked.like][: asked.shared]
            ids[: len(other)] = other[: asked.length]
        made.append(ids)
    return made


def serve(llm: Any, scenario: Scenario) -> list[list[list[int]]]:
    """Tokens of every sample of every request; of those that nobody wanted any more, none."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    numbers = range(len(scenario.requests))
    waiting = sorted(zip(scenario.requests, prompts(scenario), numbers, strict=True), key=lambda x: x[0].at)
    found: dict[int, list[list[int]]] = {}
    running: dict[int, str] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][0].at <= step or not engine.has_unfinished_requests()):
            asked, ids, number = waiting.pop(0)
            params = SamplingParams(
                temperature=0.0 if asked.samples == 1 else 0.9, max_tokens=asked.new, ignore_eos=True, n=asked.samples,
                detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            running[number] = engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        for number, asked in enumerate(scenario.requests):
            if asked.gone == step and number in running:
                engine.abort_request([str(number)])
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = [list(x.token_ids) for x in output.outputs]
        step += 1
        assert step < 20000
    return [found.get(number, []) for number in numbers]


def run(scenario: Scenario, folder: Path, twins: str) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """Tokens, and what the engine counted."""
    import torch
    from engine_tools import engine, metric, runtime

    from hisparse.config import HiSparseConfig
    from hisparse.integrations.vllm import hot
    from hisparse.integrations.vllm.layout import choose_layout

    model, calibration = model_files(folder, scenario.queries)
    Way.twins, Way.processors, Way.fast = twins, scenario.processors, scenario.fast
    Way.tlif = scenario.tlif
    hot.HOT_SHARE = 0.4  # such small pools would have no buffer
    options: dict[str, Any] = {
        "model": str(model), "dtype": scenario.dtype, "skip_tokenizer_init": True, "max_model_len": scenario.longest,
        "max_num_seqs": scenario.seqs, "max_num_batched_tokens": scenario.chunk, "seed": 0,
        "additional_config": {
            "hisparse": scenario.config, "hisparse_block_tokens": scenario.block_tokens,
            "hisparse_calibration": str(calibration),
        },
    }  # fmt: skip
    if scenario.tight is not None:
        config, dtype = HiSparseConfig(**scenario.config), getattr(torch, scenario.dtype)
        layout = choose_layout(config, 2, 64, dtype, scenario.longest, scenario.block_tokens)
        options["num_gpu_blocks_override"] = int(scenario.tight * (layout.blocks(scenario.longest) + 2))
    with _limits(scenario.limits), engine({}, scenario.memory, **options) as llm:
        torch.manual_seed(scenario.seed)
        said = serve(llm, scenario)
        counts = runtime().statistics()
        counts |= {"preemptions": metric(llm, "vllm:num_preemptions"), "hits": metric(llm, "vllm:prefix_cache_hits")}
        counts["slots"], counts["rows"] = runtime().hot_size.slots, runtime().layout.other.rows
        counts["pages"] = runtime().layout.other.pages
        for buffer in filter(None, runtime().hot):
            buffer.all.check()
    return said, counts


@contextmanager
def _limits(limits: dict[str, int]) -> Iterator[None]:
    import importlib

    places = [path.rsplit(".", 1) for path in limits]
    modules = [(importlib.import_module(f"hisparse.{path}"), name) for path, name in places]
    before = [getattr(module, name) for module, name in modules]
    for (module, name), value in zip(modules, limits.values(), strict=True):
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in zip(modules, before, strict=True):
            setattr(module, name, value)


def agreement(some: list[list[list[int]]], others: list[list[list[int]]]) -> float:
    """Share of tokens that are the same."""
    pairs = [
        (a, b)
        for x, y in zip(some, others, strict=True)
        for s, t in zip(x, y, strict=True)
        for a, b in zip(s, t, strict=True)
    ]
    return sum(a == b for a, b in pairs) / max(1, len(pairs))


def report(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Run a scenario; what it said, and how many of its tokens an engine of references says as well."""
    import checked_ops

    checked_ops.FAILED.clear()
    begin, line = time.perf_counter(), {"name": scenario.name, "error": ""}
    try:
        said, counts = run(scenario, folder, scenario.twins)
        line |= {"counts": {name: round(value, 4) for name, value in counts.items()}}
        wanted = [a for a in scenario.requests if a.gone is None]
        lengths = [[len(x) for x in s] for a, s in zip(scenario.requests, said, strict=True) if a.gone is None]
        assert lengths == [[a.new] * a.samples for a in wanted], f"tokens of each request: {lengths}"
        if scenario.compared:
            line["agreement"] = round(agreement(said, run(scenario, folder, "reference")[0]), 4)
    except Exception:  # the engine that raised is gone, and the next scenario has another
        line["error"] = "\n".join([*checked_ops.FAILED, traceback.format_exc()])[-6000:]
        line["scenario"] = asdict(scenario)
    line["seconds"] = round(time.perf_counter() - begin, 1)
    return line


def main() -> int:
    folder, given = Path(sys.argv[1]), sys.argv[2]
    gpu_on_cpu.pretend(folder)
    import checked_ops

    checked_ops.watch_all()
    good, end = True, float("inf")
    if given.startswith("drawn"):
        seed, number, seconds = map(int, given.split()[1:])
        end = time.perf_counter() + seconds
        scenarios: Iterator[Scenario] = map(drawn, range(seed, seed + number))
    else:
        scenarios = map(Scenario.of, json.loads(given))
    for scenario in scenarios:
        if time.perf_counter() > end:
            break
        line = report(scenario, folder)
        good &= not line["error"]
        print(json.dumps(line), flush=True)
    checked_ops.sketches_agree()
    worst = {name: round(value, 4) for name, value in checked_ops.WORST.items()}
    print(json.dumps({"launched": LAUNCHED, "checked": checked_ops.CHECKED, "worst": worst}), flush=True)
    return not good


if __name__ == "__main__":
    status = main()
    os._exit(status)  # an engine's threads take their time
