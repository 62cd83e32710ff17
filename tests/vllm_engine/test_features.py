"""What vLLM offers beside generating: with nothing set aside and nothing packed, all of it gives stock vLLM's tokens.

Every scenario runs on three engines of a small random model: stock, exact, and with recall, where it has to run through
and leave nothing behind.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_tools import MIB, RAW, engine, generate, metric, random_prompts, runtime

BLOCK = 64
EXACT = {**RAW, "tlif": {"prefix_length": 24}}
RECALL = {"tlif": {"prefix_length": 24}, "selection": {"min_tokens": 64, "root_factor": 0}}
GREEDY = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module")
def model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama with a tokenizer, which beam search asks for the end of a text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("features")
    shutil.copytree(small_model, folder, dirs_exist_ok=True)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w511", pad_token="w511").save_pretrained(folder)
    return folder


def said(llm: Any, prompts: list[list[int]], new: int, **sampling: Any) -> list[list[list[int]]]:
    return generate(llm, prompts, new, detokenize=False, **sampling)


def add(llm: Any, name: str, ids: list[int], new: int, priority: int = 0) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=new, **GREEDY)
    llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, params, priority=priority)


def run(llm: Any, before: Callable[[int], object] = lambda step: None) -> dict[str, list[int]]:
    """Tokens of all requests, by name. before: called before every step with its number."""
    found: dict[str, list[int]] = {}
    step = 0
    while llm.llm_engine.has_unfinished_requests():
        before(step)
        for output in llm.llm_engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    return found


def boundaries(llm: Any) -> Any:
    """Prompts that end at and beside the ends of blocks and tails, again from the cache, and several at once."""
    (ids,) = random_prompts(1023)
    lengths = (1, 24, 25, 63, 64, 65, 88, 89, 128, 1022, 1023)
    apart = [said(llm, [ids[:n]], min(new, 1024 - n)) for n in lengths for new in (1, 3)]
    return apart, [said(llm, [ids[:n]] * 3, 70) for n in (64, 129)]


def common_beginnings(llm: Any) -> Any:
    """Many requests that share eight blocks, twice."""
    (document,) = random_prompts(512)
    prompts = [document + tail for tail in random_prompts(*range(1, 33, 4))]
    return said(llm, prompts, 12), said(llm, prompts, 12)


def prompt_logprobs(llm: Any) -> Any:
    """Of prompts in the cache, which are read anew for it, in pieces: tokens, and what each position was worth."""
    from vllm import SamplingParams

    prompts = random_prompts(300, 70)
    said(llm, prompts, 1)
    params = SamplingParams(max_tokens=20, prompt_logprobs=2, **GREEDY)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    worth = [
        {token: one.logprob for token, one in at.items()} for output in outputs for at in output.prompt_logprobs[1:]
    ]
    return [list(output.outputs[0].token_ids) for output in outputs], worth


def beams(llm: Any) -> Any:
    """Beams leave and others branch off: every step is a request of its own that finds the one before in the cache."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=32, ignore_eos=True)
    found = llm.beam_search([{"prompt_token_ids": ids} for ids in random_prompts(100, 180)], params)
    return [[list(beam.tokens) for beam in output.sequences] for output in found]


def aborted(llm: Any) -> Any:
    """Requests come and go, every third step one is given up in its prompt or later, and asked again in the next step.

    It finds what was computed of it in the cache, no more; the others take its blocks. All of it happens in the same
    steps on all engines: none preempts, and all have blocks of as many tokens.
    """
    assert llm.reset_prefix_cache()
    draw = random.Random(3)
    prompts = random_prompts(*(draw.choice((30, 128, 310, 450)) for _ in range(18)))
    waiting = [(str(number), ids) for number, ids in enumerate(prompts)]
    found: dict[str, list[int]] = {}
    alive: list[str] = []
    given_up: list[str] = []
    step = 0
    while waiting or llm.llm_engine.has_unfinished_requests():
        while waiting and len(alive) < 3:
            name, ids = waiting.pop(0)
            add(llm, name, ids, draw.choice((1, 2, 20, 40)))
            alive.append(name)
        for output in llm.llm_engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                alive.remove(output.request_id)
        step += 1
        if step % 3 == 1 and alive:
            name = draw.choice((alive[0], alive[-1], alive[-1]))  # the newest is often still being read
            llm.llm_engine.abort_request([name])
            alive.remove(name)
            given_up.append(name)
            if "again" not in name:
                waiting.insert(0, (f"{name} again", prompts[int(name)]))
    kept = {name: tokens for name, tokens in found.items() if name not in given_up}
    return kept, given_up


def reset_between(llm: Any) -> Any:
    """The first and the second round find nothing in the cache, the third does."""
    prompts = random_prompts(300, 511)
    rounds = []
    for reset in (True, True, False):
        assert not reset or llm.reset_prefix_cache()
        rounds.append(said(llm, prompts, 30))
    assert rounds[0] == rounds[1]
    return rounds


def reset_while_running(llm: Any) -> Any:
    """Requests are taken out in the middle and computed anew; without leave to do so, the cache stays."""
    answers = []

    def before(step: int) -> None:
        if step in (3, 30):
            answers.append(llm.llm_engine.reset_prefix_cache(reset_running_requests=True))
        if step == 40:
            answers.append(llm.llm_engine.reset_prefix_cache())

    for name, ids in enumerate(random_prompts(300, 100, 511)):
        add(llm, str(name), ids, 70)
    return run(llm, before), answers


def paused(llm: Any) -> Any:
    """What `sleep` and updates of weights do to requests on their way: they wait, with their blocks and without."""
    core = llm.llm_engine.engine_core.engine_core

    def before(step: int) -> None:
        if step in (3, 20, 40):
            core.pause_scheduler(mode="keep", clear_cache=step != 40)
            core.resume_scheduler()

    for name, ids in enumerate(random_prompts(300, 511)):
        add(llm, str(name), ids, 60)
    found = run(llm, before)
    llm.sleep(level=0)
    llm.wake_up(tags=["scheduling"])
    return found, said(llm, random_prompts(300), 20)


def other_weights(llm: Any) -> Any:
    """Weights changed in place, and back again, the cache emptied each time."""

    def scaled(factor: float) -> Callable[[Any], None]:
        def change(network: Any) -> None:
            for name, weight in network.named_parameters():
                if "input_layernorm" in name:  # ahead of queries, keys and values, which a CPU keeps rearranged
                    weight.data.mul_(factor)

        return change

    prompts, rounds = random_prompts(300, 511), []
    for factor in (1.0, 2.0, 0.5):
        llm.apply_model(scaled(factor))
        assert llm.reset_prefix_cache()
        rounds.append(said(llm, prompts, 30))
    assert rounds[0] == rounds[2] != rounds[1]
    return rounds


def salted(llm: Any) -> Any:
    """Requests of different salt do not find each other's blocks."""
    from vllm import SamplingParams

    (ids,) = random_prompts(320)
    assert llm.reset_prefix_cache()
    hits = []
    for salt in ("a", "b", "a"):
        before = metric(llm, "vllm:prefix_cache_hits")
        given = {"prompt_token_ids": ids, "cache_salt": salt}
        llm.generate([given], SamplingParams(max_tokens=4, **GREEDY), use_tqdm=False)
        hits.append(metric(llm, "vllm:prefix_cache_hits") - before)
    assert hits[:2] == [0, 0]
    assert hits[2] > 0
    return len(hits)


def urgent(llm: Any) -> Any:
    """Of a pool too small for all those are preempted that matter least, not those that came last."""
    draw, before = random.Random(0), metric(llm, "vllm:num_preemptions")
    prompts = random_prompts(*(draw.choice((100, 300, 500)) for _ in range(9)))
    priorities = [draw.randrange(-5, 5) for _ in prompts]

    def arrive(step: int) -> None:
        number, rest = divmod(step, 3)
        if not rest and number < len(prompts):
            add(llm, str(number), prompts[number], 60, priorities[number])

    arrive(0)
    found = run(llm, lambda step: arrive(step + 1))
    assert len(found) == len(prompts)
    tight = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks_override
    assert tight is None or metric(llm, "vllm:num_preemptions") > before
    return found


SCENARIOS = (
    boundaries, common_beginnings, prompt_logprobs, beams, aborted, reset_between, reset_while_running, paused,
    other_weights, salted, urgent,
)  # fmt: skip


@pytest.fixture(scope="module")
def results(model: Path) -> dict[str, dict[str, Any]]:
    """By engine and scenario; an error in place of what went wrong, so that others can be compared."""
    found: dict[str, dict[str, Any]] = {}
    options = {
        "model": str(model),
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "scheduling_policy": "priority",
    }
    options["block_size"] = BLOCK  # of the stock engine, HiSparse has a word of its own
    # Pools of ours hold a few of the requests of `urgent`.
    for name, config, blocks in (("stock", None, None), ("exact", EXACT, 36), ("recall", RECALL, 125)):
        with engine(config, 64 * MIB, BLOCK, **options, num_gpu_blocks_override=blocks) as llm:
            found[name] = {}
            for scenario in SCENARIOS:
                try:
                    found[name][scenario.__name__] = scenario(llm)
                except Exception as error:  # told by the test of the scenario
                    found[name][scenario.__name__] = error
                    llm.llm_engine.abort_request(list(llm.llm_engine.output_processor.request_states))
            if config is RECALL:
                assert runtime().statistics()["recalled_rows"] > 0
    return found


def shape(value: Any) -> Any:
    """How many of what: tokens may differ where they are packed, their number may not."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list | tuple) else None


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_same_tokens(results: dict[str, dict[str, Any]], scenario: str) -> None:
    stock, exact, recall = (results[name][scenario] for name in ("stock", "exact", "recall"))
    for found in (stock, exact, recall):
        if isinstance(found, Exception):
            raise found
    if scenario == "prompt_logprobs":
        (stock, worth), (exact, found) = stock, exact
        assert [pytest.approx(at, abs=1e-3) for at in worth] == found
        recall = recall[0]
    assert exact == stock
    assert shape(recall) == shape(stock)
