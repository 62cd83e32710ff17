"""What `sanitize.py` runs: for every kernel of the package a small case, in the variant that serves.

Most call tests, with arguments chosen so that few kernels are compiled. Without a GPU they run in Triton's interpreter
and in the emulator (`test_sanitize.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDERS = ("decode", "vtq", "kernels", "fetch", "ops", "vllm_engine", "tlif")
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in FOLDERS]


@dataclass(frozen=True)
class Case:
    """Something to run, and the kernels that it launches; see `Launches.missing`."""

    run: Callable[[], None]
    kernels: tuple[str, ...]


CASES: dict[str, Case] = {}


def case(name: str, *kernels: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(run: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = Case(run, kernels)
        return run

    return add


def inner(test: Any) -> Callable[..., None]:
    """A test with given examples, as a function of these."""
    made: Callable[..., None] = test.hypothesis.inner_test
    return made


class Draws:
    """In the place of Hypothesis' data: each label's values, in turn; the last one stays."""

    def __init__(self, **values: list[Any]) -> None:
        self.values = values

    def draw(self, strategy: object, label: str = "unnamed") -> Any:
        values = self.values[label.replace(" ", "_")]
        return values.pop(0) if len(values) > 1 else values[0]


def device_name() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def decode(twin: str, cases: list[tuple[dict[str, Any], str | None, bool]], early: bool = False) -> None:
    """Decode attention over few pages, by few programs, so that several work on a sequence; against float64."""
    import numpy as np
    import pytest
    import torch
    from decode_oracle import expected, make_case
    from test_decode_attention import _on_device

    from hisparse.ops.decode import cuda, triton

    module: Any = cuda if twin == "cuda" else triton
    for options, split, mass in cases:
        case = make_case(**options)
        moved = _on_device(case, device_name())
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # an early start needs all to be there
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_multiprocessors", lambda index: 6)
            more = {"early": cuda.reserve(moved.q, moved.dense_k)} if early else {}
            found = module.decode_attention(*moved.arguments(), None, None, mass, split, **more)
        wanted = expected(case)[0]
        length = np.maximum(np.linalg.norm(wanted, axis=-1), 1e-6)
        error = (np.linalg.norm(found.out.double().cpu().numpy() - wanted, axis=-1) / length).max()
        print(f"{options}: error {error:.1e}", flush=True)
        if not error < 2e-2:
            raise SystemExit("wrong result")


@case(
    "decode-cuda",
    "ops/decode/decode.cu:decode BF16=1 SPLIT=1 K_BITS=5 V_BITS=5 MASS=0",
    "ops/decode/decode.cu:decode BF16=1 SPLIT=0 K_BITS=4 V_BITS=4",
    "ops/decode/decode.cu:decode BF16=0 MASS=1",
    "ops/decode/combine.cu:combine BF16=1 DIM=128",
    "ops/decode/combine.cu:combine BF16=0 DIM=64",
)
def decode_cuda() -> None:
    import torch

    half, brain = torch.float16, torch.bfloat16
    base: dict[str, Any] = {"heads": 4, "queries": 8, "dim": 128, "tokens": 8, "group": 64}
    base.update(counts=(61,), rows=(37,), lengths=(37,))
    decode("cuda", [({**base, "dtype": brain, "split": "rope"}, "rope", False)], early=True)
    decode(
        "cuda",
        [
            ({**base, "dtype": brain, "bits": (4, 4), "split": "never"}, "never", False),
            ({**base, "dtype": half, "bits": (5, 4), "split": "rope"}, "rope", True),
            ({**base, "dtype": half, "dim": 64, "queries": 7, "heads": 2, "split": "never"}, "never", True),
        ],
    )


@case("decode-triton", "ops/decode/triton.py:_decode", "ops/decode/kernels.py:combine")
def decode_triton() -> None:
    import torch

    half, brain = torch.float16, torch.bfloat16
    one: dict[str, Any] = {"counts": (3,), "rows": None, "lengths": (2,), "heads": 1}
    small: dict[str, Any] = {"dtype": half, "heads": 1, "counts": (3,), "rows": (1,), "lengths": (5,)}
    decode(
        "triton",
        [
            ({"dtype": brain, "counts": (5, 2), "rows": (2, 1), "lengths": (37, 3)}, None, False),
            ({"bits": (5, 5), "split": "rope", **one}, "rope", False),
            ({"bits": (6, 6), "split": "never", **one}, "never", False),
            ({**small, "queries": 1, "dim": 96, "group": 96, "tokens": 4}, None, True),
            ({"dtype": brain, "raw": True, "counts": (5,), "rows": (3,), "lengths": (1,), "heads": 2}, None, True),
        ],
    )


SCANS: list[tuple[int, int, int, int, int, list[int], int]] = [
    (4, 128, 8, 2, 4, [123, 63], 130),
    (8, 128, 4, 2, 8, [41, 0, 5], 50),
]
"""Heads, head size, queries a head, bits, tokens a row, rows of each sequence, width of the table."""


def scan(module: Any, shapes: list[Any], tuning: Any, dtype: Any) -> None:
    """Worth against float64; the rows chosen, with limits and without, against those of the largest worth."""
    import numpy as np
    import torch
    from test_scan_kernels import chosen_sets, expected_worth, make_case

    from hisparse.ops.scan import reference

    for shape in shapes:
        q, *rest = make_case(*shape)
        given: Any = (q.to(dtype), *rest, 0.05, 2)
        table, count = given[3:5]
        expected: Any = expected_worth(*given)  # type: ignore[no-untyped-call]
        worth = module.scan_rows(*given, tuning)
        used = np.isfinite(expected)
        if not np.abs(worth.double().cpu().numpy()[used] / expected[used] - 1).max() < 6e-3:
            raise SystemExit(f"wrong worth of {shape}")
        limits = torch.tensor([7, 30, 0][: len(count)], dtype=torch.int32, device=q.device)
        right, limited = (chosen_sets(reference.select_top(worth, table, count, 32, most)) for most in (None, limits))
        for found, wanted in (
            (module.scan_and_select(*given, 32, None, tuning), right),
            (module.scan_and_select(*given, 32, limits, tuning), limited),
            (module.select_top(worth, table, count, 32, None, tuning), right),
        ):
            if chosen_sets(found) != wanted:
                raise SystemExit(f"wrong rows of {shape}")


@case(
    "scan-step",
    "ops/scan/weigh.cu:weigh_queries QTYPE=1",
    "ops/scan/step.cu:scan_and_choose CHOOSE=0",
    "ops/scan/step.cu:scan_and_choose CHOOSE=1 QUERIES=8",
    "ops/scan/step.cu:scan_and_choose CHOOSE=1 QUERIES=4",
)
def scan_step() -> None:
    """One kernel scans and chooses."""
    import torch

    from hisparse.ops.scan import cuda

    scan(cuda, SCANS, None, torch.bfloat16)


@case(
    "scan-four",
    "ops/scan/weigh.cu:weigh_queries",
    "ops/scan/scan.cu:scan_rows QUERIES=8",
    "ops/scan/select.cu:sum_rows",
    "ops/scan/select.cu:count_rows",
    "ops/scan/select.cu:choose_rows",
)
def scan_four() -> None:
    """Four kernels, as for many sequences."""
    import torch

    from hisparse.ops.scan import cuda

    scan(cuda, SCANS[:1], cuda.Tuning(whole=False), torch.float16)


@case(
    "scan-triton",
    *(f"ops/scan/kernels.py:{name}" for name in ("weigh_queries", "scan_share", "combine_shares", "sum_heads")),
    *(f"ops/scan/choose.py:{name}" for name in ("count_first", "take_first", "take_rest")),
)
def scan_triton() -> None:
    import torch

    from hisparse.ops.scan import triton

    scan(triton, [(2, 128, 8, 2, 4, [70, 41], 75)], None, torch.bfloat16)


def fetch(module: Any) -> None:
    """Rows of two sequences, each with a buffer; where each lies is what a model in plain Python says."""
    from test_fetch_rows import test_ages_beyond_the_last_are_alike, test_large_budgets_in_cuda

    test_large_budgets_in_cuda(module, 61)
    test_ages_beyond_the_last_are_alike(module)


@case(
    "fetch-cuda",
    "ops/fetch/fetch.cu:fetch_rows MERGE=0",
    "ops/fetch/fetch.cu:fetch_rows MERGE=1",
    "ops/fetch/held.cu:list_held",
)
def fetch_cuda() -> None:
    from test_fetch_rows import test_all_rows_of_a_buffer, test_sequences_share_a_buffer_in_cuda

    from hisparse.ops.fetch import cuda

    fetch(cuda)
    test_sequences_share_a_buffer_in_cuda(cuda, 3, 61, 400)
    held = inner(test_all_rows_of_a_buffer)
    held(cuda, [300, 1, 77], Draws(unnamed=[[5, 0, 299, 300, *range(310, 350)]]))


@case(
    "fetch-triton",
    "ops/fetch/triton.py:assign",
    "ops/fetch/triton.py:move TO_HOST=0 PLACED=1 LIMITED=1",
    "ops/fetch/triton.py:move TO_HOST=0 PLACED=0 LIMITED=0",
    "ops/fetch/triton.py:move TO_HOST=1",
)
def fetch_triton() -> None:
    import pytest
    from test_fetch_rows import test_many_rows_take_several_tiles, test_rows_of_any_size_move_both_ways

    from hisparse.ops.fetch import triton

    fetch(triton)
    for row_bytes in (48, 2592):
        test_rows_of_any_size_move_both_ways(triton, row_bytes, 7)
    with pytest.MonkeyPatch.context() as patch:
        test_many_rows_take_several_tiles(triton, patch)


@case(
    "pack-cuda",
    "ops/pack/pack.cu:pack FLOAT16=0 K_SPLIT=1 INDEXED=0",
    "ops/pack/pack.cu:pack FLOAT16=1 K_SPLIT=0 INDEXED=0",
)
def pack_cuda() -> None:
    import torch
    from test_pack_cuda import FORMATS, statistics
    from test_pack_cuda import case as tokens_of

    from hisparse.ops.pack import cuda, reference

    for fmt in (FORMATS[0], FORMATS[3]):
        stats = statistics(fmt)
        for split, dtype, strided in (("rope", torch.bfloat16, True), ("never", torch.float16, False)):
            k, v = tokens_of(fmt, 37, dtype, strided)
            # Moving a view keeps its strides.
            moved = k.to(device_name()), v.to(device_name())
            found = cuda.pack_pages(*moved, stats.to(device_name()), fmt, split, 0.15)
            if not torch.equal(found.cpu(), reference.pack_pages(k, v, stats, fmt, split, 0.15)):
                raise SystemExit(f"wrong pages: {fmt}")


@case("pack-triton", "ops/pack/triton.py:_pack", "ops/unpack/triton.py:_unpack")
def pack_triton() -> None:
    import pytest
    import torch
    from test_pack_kernels import FORMATS, test_bytes_are_those_of_the_reference, test_unpacked_values

    for fmt, split, dtype in ((FORMATS[1], "rope", torch.bfloat16), (FORMATS[2], "never", torch.float16)):
        test_bytes_are_those_of_the_reference(fmt, split, 5, dtype)
        with pytest.MonkeyPatch.context() as patch:
            test_unpacked_values(fmt, torch.bfloat16, "rope", patch)


@case(
    "sketch",
    "ops/sketch/kernels.py:sketch_bfloat16 INDEXED=0",
    "ops/sketch/kernels.py:sketch_bfloat16 INDEXED=1",
    "ops/sketch/triton.py:_build",
    "ops/sketch/triton.py:_score",
    "ops/select/triton.py:_denominators",
    "ops/select/triton.py:_worth",
)
def sketch() -> None:
    import test_sketch_kernels as tests
    import torch

    shape = (5, 4, 2, 128, 2)
    for dtype in (torch.float32, torch.bfloat16):
        tests.test_sketches_are_the_nearest_codes(*shape, dtype)
    tests.test_tokens_and_rows_lie_anywhere(*shape, torch.bfloat16)
    tests.test_scores(*shape, 3, 5)
    for sizes in ((3, 1, 123, 4, 9), (4, 2, 5, 3, 2)):
        tests.test_rows_of_most_worth(*sizes)


@case(
    "prefill",
    *(f"ops/attend/kernels.py:{name}" for name in ("_merge", "_gather", "_coordinates", "_worth")),
    "ops/unpack/triton.py:_unpack",
)
def prefill() -> None:
    """Attention of a chunk over pages on the device and on the host, and the rows of most worth to it."""
    import test_attention as tests
    import torch

    from hisparse.ops.attend import triton

    for rows, size in ((7, 2624), (40, 48)):
        tests.test_gathered_pages_are_those_asked_for(rows, size)
    past = inner(tests.test_past_in_slices_from_anywhere)
    some: dict[str, Any] = {"heads": 2, "group": 4, "chunk": 9, "dense": 13, "room": 64, "seed": 1}
    some |= {"pages": [(5, 8), (18, 4), (9, 4)], "places": ["device", "scattered", "segments"]}
    for dim, dtype in ((128, torch.bfloat16), (64, torch.float16)):
        past(triton, dim=dim, dtype=dtype, **some)
    worth = inner(tests.test_worth_of_rows_is_the_sum_of_roots_of_attention)
    worth(heads=2, group=4, dim=128, chunk=70, rows=60, row_size=4, bits=2, seed=1)


@case("tlif", "tlif/fused.py:_norms", *(f"tlif/fused.py:_importance Q={size} F=512" for size in (64, 128)))
def tlif() -> None:
    """Few tokens, also by the programs that serve long texts."""
    from test_fused import test_importance_is_the_networks

    importance = inner(test_importance_is_the_networks)
    for tokens, past, queries in ((200, 128, 128), (150, 3, 64)):
        importance(features=512, prefix=128, tokens=tokens, past=past, queries=queries, seed=tokens)


@case(
    "vllm-step",
    *(f"integrations/vllm/step_kernels.py:{name}" for name in ("_begin", "_fill_table", "_limit", "_renew")),
)
def vllm_step() -> None:
    """What precedes a decode step of a batch: its tables, and its dense tokens."""
    import test_step_kernels as tests
    import torch

    for skip in (None, 3):
        inner(tests.test_tables)(first=7, other=9, width=300, batch=3, skip=skip, seed=1)
    tests.test_renewed_dense_tokens(4, 128, torch.bfloat16, "narrowed")
    for config in ("host", "device", "raw"):
        drawn = Draws(config=[config], tail=[40], root=[12.3], batch=[4], unnamed=[1], past=[0, 900, 333, 70])
        drawn.values |= {
            "new": [1, 1, 1, 0],
            "found": [0, 3, 0],
            "no_ring": [1],
            "most": [40],
            "each": [9],
            "laid_out_otherwise": [True],
        }
        inner(tests.test_a_whole_step)(drawn)


@case(
    "vllm-hot",
    *(f"integrations/vllm/kernels.py:{name}" for name in ("_claim", "_list", "_hand_out", "_locate")),
    "ops/fetch/fetch.cu:fetch_rows MERGE=1",
)
def vllm_hot() -> None:
    """Rows that requests share, in the buffer that they share: by the plugin's kernels, and by that for batches."""
    import test_hot as tests

    every = list(range(0, tests.BLOCKS * tests.LAYOUT.host_rows, 7))
    batches = [([every[:9], every[4:13], [], every[9:0:-1]], 9), ([every[-5:], every[:3]], 7)]
    for batch in batches:
        inner(tests.test_a_batch_lists_every_row_once)(batch=batch)
        inner(tests.test_rows_are_where_they_lie_without_a_buffer)(batch=batch, on_host=True)
    inner(tests.test_slots_hold_the_rows_that_were_asked_for)(steps=[*batches, batches[0]], gone=[0, 7, 3])


VLLM_PACK = "ops/pack/pack.cu:pack INDEXED=1", "ops/sketch/kernels.py:sketch_bfloat16 INDEXED=1"


@case("vllm-pack", *VLLM_PACK)
def vllm_pack() -> None:
    """Full blocks, packed by one launch after the other."""
    pack_blocks(graphs=False)


@case("vllm-graphs", *VLLM_PACK)
def vllm_graphs() -> None:
    """Full blocks, packed by graphs where there is a GPU."""
    pack_blocks(graphs=device_name() == "cuda")


def pack_blocks(graphs: bool) -> None:
    import pytest
    import test_packing as tests

    from hisparse.integrations.vllm import memory

    class Engine(tests.Engine):
        def __init__(self, kind: str, captured: bool, **options: Any) -> None:
            super().__init__(kind, captured and graphs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "host_pool", tests.pool)
        patch.setattr(tests, "LAYERS", 1)
        patch.setattr(tests, "Engine", Engine)
        # Four heads: pages without padding, which another twin would get.
        tests.test_blocks_packed_together_are_those_packed_alone("host", False, 4, patch)


@case("yardsticks", "bench/kernels.py:_read", "bench/kernels.py:_copy")
def yardsticks() -> None:
    import torch

    from hisparse.bench.kernels import copy_all, read_all

    x = torch.arange(7 * 1024, dtype=torch.int32, device=device_name())
    copy = torch.zeros_like(x)
    copy_all(x, copy, 3, 1024, 4)
    if int(read_all(x, 3, 1024, 4).sum()) != int(x.sum()) or not torch.equal(copy, x):
        raise SystemExit("wrong copy or sum")
