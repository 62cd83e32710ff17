"""The engine with packed blocks, sketches and recall: more tokens in the same memory, and the right text."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_tools import MIB, capacity, engine, generate, metric, runtime

from hisparse.errors import ConfigError
from hisparse.evaluate.needles import NeedleContext, build_contexts, prompt_parts


@pytest.mark.parametrize("longest", [8192, 32768])
def test_the_scheduler_sees_nine_times_the_tokens(longest: int) -> None:
    """In the same bytes as the stock engine's bfloat16 cache, for requests of up to `longest` tokens."""
    longer = {"max_model_len": longest, "hf_overrides": {"max_position_embeddings": longest}, "dtype": "bfloat16"}
    memory = 1536 * MIB
    with engine(None, memory, **longer) as llm:
        stock = capacity(llm)
    with engine({}, memory, **longer) as llm:
        ours = capacity(llm)
        layout = runtime().layout
        with pytest.raises(ConfigError, match="--num-gpu-blocks-override"):
            runtime().check_host(1000, free=1000 * layout.host_block_bytes)
        runtime().check_host(1000, free=31 * 1000 * layout.host_block_bytes)
    assert ours >= 9 * stock, (ours, stock, layout)
    assert layout.other.rows * layout.row.tokens + layout.other.pages * layout.page.tokens == layout.tokens


def test_a_prompt_larger_than_the_stock_pool(ids: list[int]) -> None:
    """1 800 tokens in the memory of 1 000: stock refuses the length at start, HiSparse reads the prompt."""
    memory = 45 * MIB
    with pytest.raises(ValueError, match="KV cache"), engine(None, memory, max_model_len=2048):
        pass
    with engine({}, memory, max_model_len=2048) as llm:
        (found,) = generate(llm, [ids[:1800]], 8)
    assert len(found[0]) == 8


@pytest.fixture(scope="module")
def contexts(prose: str) -> list[NeedleContext]:
    from transformers import AutoTokenizer

    from hisparse.models.load import default_directory

    tokenizer = AutoTokenizer.from_pretrained(default_directory())
    return build_contexts(tokenizer, prose, "single", 1600, 4)


def ask(llm: Any, contexts: list[NeedleContext]) -> list[bool]:
    """Which needles are found. Each document is read before its question, which then hits the prefix cache."""
    tokenizer = llm.get_tokenizer()
    found = []
    for context in contexts:
        (needle,) = context.needles
        document, question = prompt_parts(tokenizer, context.document, needle.key)
        generate(llm, [document], 1)
        ((answer,),) = generate(llm, [document + question], 8)
        found.append(needle.value in tokenizer.decode(answer))
    return found


def test_needles_come_back_through_recall(contexts: list[NeedleContext]) -> None:
    """What the stock engine finds is found; without recall (everything set aside is dropped) it is not."""
    with engine(None) as llm:
        stock = ask(llm, contexts)
    with engine({}) as llm:
        recalled = ask(llm, contexts)
        rows = runtime().statistics()["recalled_rows"]
    with engine({"evict": "drop"}) as llm:
        dropped = ask(llm, contexts)
    assert sum(stock) >= 3
    assert sum(recalled) >= sum(stock) - 1, (recalled, stock)
    assert rows > 0
    assert sum(dropped) <= 1


def agreement(some: list[list[list[int]]], others: list[list[list[int]]]) -> float:
    """Share of tokens that are the same."""
    pairs = [(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x[0], y[0], strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_hits_company_and_small_pieces_leave_the_text_alone(ids: list[int]) -> None:
    """The same prompts alone, again from the prefix cache, and together.

    Packing is a function of a block's tokens: a block found in the cache is the one that the request would have made. A
    prompt read at once attends densely to itself, one found in the cache to what is packed: that may change a token.
    """
    prompts = [ids[60 * i : 60 * i + length] for i, length in enumerate((300, 1100, 700))]
    with engine({"selection": {"min_tokens": 256}}, max_num_batched_tokens=512) as llm:
        alone = [generate(llm, [prompt], 24)[0] for prompt in prompts]
        before = metric(llm, "vllm:prefix_cache_hits")
        again = [generate(llm, [prompt], 24)[0] for prompt in prompts]
        hits = metric(llm, "vllm:prefix_cache_hits") - before
        together = generate(llm, prompts, 24)
    assert hits == 256 + 1024 + 512
    assert together == again
    assert agreement(again, alone) >= 0.9


def test_preempted_requests_go_on_where_they_were(ids: list[int]) -> None:
    """Three requests fit when they begin, and not when they have grown."""
    prompts = [ids[400 * i : 400 * i + 300] for i in range(3)]
    with engine({}, max_model_len=1024) as llm:
        roomy = generate(llm, prompts, 90)
        assert metric(llm, "vllm:num_preemptions") == 0
        layout = runtime().layout
    one = 2 + -(-300 // layout.ring_tokens)
    with engine({}, max_model_len=1024, num_gpu_blocks_override=3 * one + 4) as llm:
        tight = generate(llm, prompts, 90)
        assert metric(llm, "vllm:num_preemptions") > 0
    assert agreement(tight, roomy) >= 0.9


def crowd(llm: Any, ids: list[int]) -> list[list[list[int]]]:
    """Alone, found in the prefix cache, together, and again when others' blocks have taken the place of the first."""
    prompts = [ids[500 * i : 500 * i + 400] for i in range(6)]
    said = generate(llm, prompts[:1], 16) + generate(llm, [prompts[0] + ids[:5], prompts[0] + ids[9:12]], 16)
    said += generate(llm, prompts[1:], 24)
    before = metric(llm, "vllm:prefix_cache_hits")
    said += generate(llm, prompts[:1], 16)
    assert metric(llm, "vllm:prefix_cache_hits") - before < 384  # some blocks were evicted and written anew
    return said


def test_a_hot_buffer_leaves_the_text_alone(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as on a GPU, with the buffer and without: rows that blocks held before they were evicted are not read."""
    monkeypatch.setattr("hisparse.integrations.vllm.runtime.STATIC", ("cpu", "cuda"))
    monkeypatch.setattr("hisparse.integrations.vllm.hot.HOT_SHARE", 1 / 4)
    said, blocks, counts = [], [], {}
    for factor in (2.0, 0.0):
        selection = {"min_tokens": 64, "root_factor": 0, "hot_factor": factor}
        config = {"selection": selection, "tlif": {"prefix_length": 32}}
        with engine(config, 20 * MIB, 64, max_model_len=512, max_num_seqs=4) as llm:
            said.append(crowd(llm, ids))
            blocks.append(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
            state = runtime()
            if factor:
                counts, size, layout = state.statistics(), state.hot_size, state.layout
                for hot in state.hot:
                    hot.all.check()
    assert said[0] == said[1]
    assert size.requests == 4
    assert counts["hot_hits"] > counts["hot_misses"] > 0
    assert counts["recalled_rows"] >= counts["hot_hits"] + counts["hot_misses"]  # chunks recall as well
    taken = (blocks[1] - blocks[0]) * layout.block_bytes
    assert abs(taken - size.bytes) <= layout.block_bytes  # of each layer's bytes
