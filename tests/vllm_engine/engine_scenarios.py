"""What engines are asked for in the emulator: few requests that launch every kernel, and any number drawn at random."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass
class Asked:
    """A request: at which step it comes, how long its prompt is, which other's beginning it shares and how much of it,
    how many tokens and samples it wants. gone: the step at which nobody wants it any more."""

    at: int
    length: int
    new: int
    samples: int = 1
    like: int | None = None
    shared: int = 0
    gone: int | None = None


@dataclass
class Scenario:
    """An engine and what is asked of it.

    queries: query heads a KV head; tight: blocks, as many as a request of the greatest length takes times this (None:
    as `memory` gives). limits: numbers of HiSparse's modules, "ops.fetch.cuda.MOST_ENTRIES", that make operations take
    another way than they would with so few requests. compared: another engine of references is asked the same. tlif:
    the model has one.
    """

    name: str
    requests: list[Asked]
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    queries: int = 2
    seqs: int = 4
    chunk: int = 96
    block_tokens: int = 64
    longest: int = 512
    memory: int = 3 * MIB
    tight: float | None = None
    twins: str = "cuda"
    processors: int = 6
    fast: bool = True
    limits: dict[str, int] = field(default_factory=dict)
    compared: bool = False
    tlif: bool = False
    seed: int = 0

    @classmethod
    def of(cls, given: dict[str, Any]) -> Scenario:
        """From the fields of one, as `dataclasses.asdict` gives them."""
        return cls(**{**given, "requests": [Asked(**request) for request in given["requests"]]})


EVERY_KERNEL = [
    Scenario(
        "rows of the host through a hot buffer",
        [
            Asked(0, 210, 9),
            Asked(2, 60, 6),
            Asked(4, 200, 4, like=0, shared=192),
            Asked(8, 70, 3, samples=2),
            Asked(14, 260, 3),  # in blocks of others, whose rows are in the buffer
        ],
        {
            "tlif": {"prefix_length": 24},
            "selection": {"min_tokens": 16, "root_factor": 1.0, "row_size": 8, "share_layers": 2},
            "prefill": {"mode": "recall", "recall_max_tokens": 8},
        },
        queries=4,
        chunk=128,
        longest=320,
        tight=1.1,
        tlif=True,
    ),
    Scenario(
        "many requests, in Triton what CUDA C++ leaves to it",
        [Asked(0, 150, 4), Asked(1, 130, 3), Asked(2, 40, 2)],
        {
            "tlif": {"prefix_length": 16},
            "selection": {"min_tokens": 16, "root_factor": 0.5, "row_size": 8},
            "prefill": {"choose": "token"},
        },
        queries=4,
        chunk=48,
        longest=256,
        fast=False,
        limits={"ops.scan.cuda.MOST": 0, "ops.fetch.cuda.MOST_ENTRIES": 3, "ops.attend.triton.WORKSPACE": 1 << 14},
    ),
    Scenario(
        "Triton alone, no hot buffer",
        [Asked(0, 100, 2), Asked(1, 20, 2)],
        {"tlif": {"prefix_length": 16}, "selection": {"min_tokens": 16, "root_factor": 0.5, "hot_factor": 0}},
        "float16",
        chunk=48,
        longest=256,
        twins="triton",
    ),
]
"""Together they launch every kernel of the plugin."""


def drawn(seed: int) -> Scenario:
    """One of any kind."""
    rng = random.Random(seed)
    pick = rng.choice
    page, row = pick([4, 4, 8, 16]), pick([4, 4, 8])
    unit = math.lcm(page, row)
    tokens = pick([t for t in (32, 48, 64, 96, 128) if t % unit == 0 and t >= 2 * max(unit, 4)])
    longest = rng.randrange(max(3 * tokens, 150), 600)
    evict = pick(["host"] * 14 + ["none", "drop"])
    twins = pick(["cuda"] * 5 + ["triton"])
    most = pick([4, 16, 40, 100, 2000])
    mode = "full" if evict == "drop" else pick(["full", "recall"])
    config: dict[str, Any] = {
        "evict": evict,
        "tlif": {"prefix_length": rng.randrange(8, 70), "scorer": pick(["tlif", "random"])},
        "selection": {
            "min_tokens": most,
            "root_factor": pick([0.0, 1.0, 2.5]),
            "row_size": row,
            "rows": pick(["host", "host", "host", "device"]),
            "hot_factor": pick([0, 1, 2, 2, 3.5]),
            "share_layers": pick([1, 1, 2]),
            **pick([{}, {"sketch_bits": 1}, {"sketch_bits": 2}]),
        },
        "vtq": {
            "page_size": page,
            "default_bit_width": pick([5] * 6 + [4] * 3 + [6]),
            "value_bit_width": pick([None, None, 4, 5]),
            "split": pick(["rope"] * 6 + ["never"] * 3 + ["peaks"]),
            "channel_group": 64 if rng.random() < 0.9 else 32,
            "enable_per_block_quant": evict == "drop" or rng.random() > 0.05,
        },
        "prefill": {
            "mode": mode,
            "recall_max_tokens": pick([1, 8, 30, 256]),
            "choose": pick(["chunk", "token"]),
        },
        "budget": {"capacity": pick([None, 1.0, 3.0, 9.0]), "max_keep": pick([0.37, 0.7]), "min_keep": 0.01},
    }
    limits: dict[str, int] = {}
    if rng.random() < 0.4:
        limits["ops.attend.triton.WORKSPACE"] = pick([1, 1 << 14, 1 << 16])
    if rng.random() < 0.3:
        limits["ops.fetch.cuda.MOST_ENTRIES"] = pick([3, 20])
    if rng.random() < 0.5:
        limits["integrations.vllm.step_kernels.SLOTS"] = 32
    if rng.random() < 0.3:
        limits["ops.fetch.cuda.LEAST"] = pick([32, 64])
    if rng.random() < 0.3:
        limits["ops.scan.cuda.MOST"] = pick([0, 1, 2])
    if rng.random() < 0.4:
        few = pick([0, 10, 40])
        limits |= {"integrations.vllm.step.EVERYTHING": few, "integrations.vllm.step_kernels.EVERYTHING": few}
    if rng.random() < 0.3:
        limits["cache.layer.CHUNK_BUDGET"] = limits["integrations.vllm.memory.CHUNK_BUDGET"] = pick([1, 2])
    vtq = config["vtq"]
    # Attention in Triton's interpreter takes seconds a step.
    slow = twins == "triton" or vtq["default_bit_width"] == 6 or vtq["split"] == "peaks" or vtq["channel_group"] == 32
    requests: list[Asked] = []
    crowd = not slow and rng.random() < 0.25  # that does not fit once it has grown
    at, left = 0, 8 if slow or not vtq["enable_per_block_quant"] else 60
    for number in range(0 if crowd else rng.randrange(2, 8)):
        new = min(left, pick([1, 2, 5, 12, 30, tokens + 3]))
        if new < 1:
            break
        lengths = [1, 2 * tokens, *(rng.randrange(2 * tokens, longest) for _ in range(6))]
        length = max(1, min(pick(lengths), longest - new))
        like = rng.randrange(number) if number and rng.random() < 0.5 else None
        samples = pick([1, 1, 1, 2, 3])
        gone = at + rng.randrange(2, 12) if rng.random() < 0.15 else None
        shared = rng.randrange(longest) if like is not None else 0
        requests.append(Asked(at, length, new, samples, like, shared, gone))
        left -= new
        at += pick([0, 0, 1, 3, 10])
    if crowd:
        requests = [Asked(i // 2, rng.randrange(tokens // 2, 2 * tokens), rng.randrange(10, 40)) for i in range(4)]
        requests += [Asked(9 * i, rng.randrange(2 * tokens, 3 * tokens), rng.randrange(1, 9)) for i in range(1, 4)]
        longest = max(longest, 3 * tokens + 40)
    seqs = rng.randrange(4, 9) if crowd else rng.randrange(1, 9)
    return Scenario(
        f"drawn {seed}",
        requests,
        config,
        pick(["bfloat16", "bfloat16", "float16", "float32"] if twins == "triton" else ["bfloat16", "float16"]),
        pick([1, 2, 4, 4]),
        seqs,
        max(seqs, pick([16, 50, 100, 200])),
        tokens,
        longest,
        pick([2, 3, 6]) * MIB,
        pick([1.05, 1.2, 1.4]) if crowd else pick([None, None, 1.1, 1.5, 2.0]),
        twins,
        pick([1, 2, 6, 17, 60]),
        pick([True, True, False]),
        limits,
        most == 2000,
        rng.random() < 0.3,
        seed,
    )
