"""With nothing set aside and nothing packed, the engine gives the stock engine's tokens, whatever it is asked to do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_tools import RAW, engine, generate, metric, runtime

SMALL = {**RAW, "tlif": {"prefix_length": 24}}
# Blocks of 64 tokens and a tail of 24, so that requests cross many blocks and rings turn over.
BLOCK = 64


def ask(llm: Any, ids: list[int]) -> dict[str, Any]:
    """What is compared: many lengths at once, prompts with a common beginning, and a few that grow side by side."""
    lengths = (1, 2, 63, 64, 65, 128, 200, 511, 700)
    batch = [ids[37 * i : 37 * i + length] for i, length in enumerate(lengths)]
    document = ids[1000:1400]
    return {
        "batch": generate(llm, batch, 48),
        "crowd": crowd(llm, ids),
        "first": generate(llm, [document + ids[:9]], 12),
        "again": generate(llm, [document + ids[:9], document + ids[50:90], document[:130] + ids[:7]], 12),
    }


def crowd(llm: Any, ids: list[int]) -> list[list[list[int]]]:
    """A few that grow side by side."""
    return generate(llm, [ids[300 * i : 300 * i + 100] for i in range(3)], 100)


def sample(llm: Any, ids: list[int]) -> list[list[list[int]]]:
    """Three samples of one prompt. vLLM on a CPU cannot seed a prompt that it reads in pieces."""
    return generate(llm, [ids[2000:2300]], 70, n=3, temperature=0.9, seed=7)


def follow(llm: Any, ids: list[int]) -> list[list[int]]:
    """While a request decodes across a block's end, others arrive that begin with all it has said so far.

    One of them meets the block in the very step that fills it. Returns the tokens of all, the first request's first.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    longer = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    first, begun = ids[500:559], 1
    engine.add_request("0", {"prompt_token_ids": first}, longer)
    said: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            said[output.request_id] = list(output.outputs[0].token_ids)
        known = said.get("0", [])
        if len(known) == begun < 12:
            engine.add_request(str(begun), {"prompt_token_ids": [*first, *known, 7]}, greedy)
            begun += 1
    return [said[str(number)] for number in range(begun)]


@pytest.fixture(scope="module")
def stock(ids: list[int]) -> dict[str, Any]:
    with engine(None) as llm:
        return {**ask(llm, ids), "samples": sample(llm, ids), "follow": follow(llm, ids)}


def test_same_tokens(stock: dict[str, Any], ids: list[int]) -> None:
    with engine(SMALL, block_tokens=BLOCK) as llm:
        found = {**ask(llm, ids), "samples": sample(llm, ids), "follow": follow(llm, ids)}
        hits = metric(llm, "vllm:prefix_cache_hits")
    assert found == stock
    assert hits > 0


def test_same_tokens_from_tables_at_fixed_addresses(
    stock: dict[str, Any], ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of single tokens as CUDA graphs take them: shapes of the longest request, requests in one call."""
    monkeypatch.setattr("hisparse.integrations.vllm.runtime.STATIC", ("cpu", "cuda"))
    with engine(SMALL, block_tokens=BLOCK, max_model_len=768, max_num_seqs=4) as llm:
        found = {"crowd": crowd(llm, ids), "follow": follow(llm, ids)}
        assert runtime().layers[0].batched
    assert found == {name: stock[name] for name in found}


def test_same_tokens_in_small_chunks_and_a_tight_pool(stock: dict[str, Any], ids: list[int]) -> None:
    """Prompts are read 96 tokens a step beside decoding ones, and the pool is too small for all: some are preempted."""
    tight = {"max_num_batched_tokens": 96, "max_model_len": 768, "num_gpu_blocks_override": 15}
    with engine(SMALL, block_tokens=BLOCK, **tight) as llm:
        found = ask(llm, ids)
        preempted = metric(llm, "vllm:num_preemptions")
    assert found == {name: stock[name] for name in found}
    assert preempted > 0
