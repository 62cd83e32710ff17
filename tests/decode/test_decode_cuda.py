"""Decode attention in CUDA C++: against float64 on the GPU; and, without one, that it compiles."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from decode_oracle import check, make_case
from test_decode_attention import _on_device, spread

from hisparse.ops import _cuda
from hisparse.ops.decode import DecodeResult

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = {
    "PAGE_HEADS": 4,
    "HEADS": 4, "QUERIES": 8, "DIM": 128, "GROUP": 64, "K_BITS": 5, "V_BITS": 5, "SPLIT": 1, "BF16": 1, "KEPT_P": 8,
    "ROWS_P": 4, "TILES": 3, "STAGES": 6, "BLOCKS": 1, "MASS": 0, "MULTIPLY": 0,
}  # fmt: skip


def run_cuda(case, monkeypatch, page_mass=False, split="rope", tuning=None):  # type: ignore[no-untyped-def]
    """The CUDA twin; buffers are born full of NaN. Fails where the call would have gone to the Triton twin."""
    from hisparse.ops.decode import cuda

    plain = torch.Tensor.new_empty

    def poisoned(self, *size, **kwargs):  # type: ignore[no-untyped-def]
        out = plain(self, *size, **kwargs)
        return out.fill_(float("nan")) if out.dtype.is_floating_point else out

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    case = _on_device(copy.copy(case), "cuda")
    assert cuda.supports(case.q, case.dense_k, case.kept, case.recalled, case.stats, None, page_mass, split)
    result = cuda.decode_attention(*case.arguments(), None, None, page_mass, split, tuning)
    return DecodeResult(*(None if x is None else x.cpu() for x in result))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_mass", [False, True], ids=["", "mass"])
def test_at_the_common_shape(dtype, page_mass, monkeypatch):  # type: ignore[no-untyped-def]
    case = make_case(
        dtype, 4, 8, 128, 8, group=64, split="rope", counts=(37, 0, 300, 5), rows=(2, 0, 77, 1), lengths=(37, 0, 148, 3)
    )
    check(case, run_cuda(case, monkeypatch, page_mass), page_mass=page_mass)


@needs_gpu
@pytest.mark.parametrize(
    ("dim", "group", "heads", "queries", "tokens"),
    [
        (64, 64, 2, 7, 8), (64, 64, 3, 3, 4), (128, 128, 1, 8, 16), (128, 64, 8, 4, 8), (128, 64, 5, 1, 4),
        (256, 64, 1, 4, 8), (256, 256, 2, 8, 4), (128, 64, 4, 2, 64), (128, 64, 15, 2, 4), (256, 128, 8, 2, 16),
        (128, 64, 8, 4, 64), (128, 64, 6, 2, 64),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("split", ["rope", "never"])
def test_at_every_shape(dim, group, heads, queries, tokens, split, monkeypatch):  # type: ignore[no-untyped-def]
    case = make_case(
        torch.float16,
        heads,
        queries,
        dim,
        tokens,
        group=group,
        split=split,
        counts=(3, 40),
        rows=(9, 1),
        lengths=(5, 1),
    )
    mass = tokens <= 16
    check(case, run_cuda(case, monkeypatch, mass, split), page_mass=mass)


@needs_gpu
@pytest.mark.parametrize("bits", [(4, 4), (4, 5), (5, 4)], ids=str)
def test_at_every_width(bits, monkeypatch):  # type: ignore[no-untyped-def]
    for dim in (64, 128, 256):
        case = make_case(
            torch.bfloat16, 2, 5, dim, 8, bits=bits, split="rope", group=64, counts=(30,), rows=None, lengths=(300,)
        )
        check(case, run_cuda(case, monkeypatch))


def test_what_it_hands_on(monkeypatch):  # type: ignore[no-untyped-def]
    """Shapes that need more warps than have registers, and what it has no code for."""
    from hisparse.ops.decode import cuda

    monkeypatch.setattr(cuda, "can_run", lambda index: True)

    def serves(heads=4, dim=128, tokens=8, queries=2, dtype=torch.bfloat16, split="rope", mass=False, **options):  # type: ignore[no-untyped-def]
        case = make_case(
            dtype, heads, queries, dim, tokens, split="rope", counts=(1,), rows=None, lengths=(1,), **options
        )
        return cuda.supports(case.q, case.dense_k, case.kept, case.recalled, case.stats, case.extra_logit, mass, split)

    yes = [{}, {"heads": 8}, {"heads": 4, "tokens": 64}, {"dim": 256, "heads": 8}, {"heads": 3},
           {"heads": 8, "tokens": 64}, {"dim": 256, "heads": 16}]  # fmt: skip
    no = [
        {"heads": 3, "tokens": 64}, {"heads": 17}, {"dtype": torch.float32}, {"split": None},
        {"split": "peaks"}, {"dim": 96, "group": 96}, {"queries": 9}, {"bits": (6, 5)}, {"extra": 2}, {"raw": True},
        {"tokens": 32, "mass": True}, {"tokens": 2}, {"group": 32},
    ]  # fmt: skip
    assert [options for options in yes if not serves(**options)] == []
    assert [options for options in no if serves(**options)] == []


@needs_gpu
def test_pages_inside_wider_rows(monkeypatch):  # type: ignore[no-untyped-def]
    case = make_case(torch.bfloat16, 2, 4, 128, 8, split="rope", counts=(50, 3), rows=(9, 0), lengths=(5, 1))
    want = copy.copy(case)
    result = run_cuda(spread(case), monkeypatch)
    check(want, result)


@needs_gpu
@pytest.mark.parametrize("processors", [5, 7, 40])
@pytest.mark.parametrize("rows", [None, (150,)], ids=str)
def test_long_shares(processors, rows, monkeypatch):  # type: ignore[no-untyped-def]
    """Shares of more stages than the pipeline is deep, of one kind of page or two."""
    from hisparse.ops.decode import cuda

    monkeypatch.setattr(cuda, "_multiprocessors", lambda index: processors)
    case = make_case(torch.bfloat16, 4, 8, 128, 8, group=64, split="rope", counts=(301,), rows=rows, lengths=(148,))
    check(case, run_cuda(case, monkeypatch))


@needs_gpu
def test_steps_and_scores_of_any_size(monkeypatch):  # type: ignore[no-untyped-def]
    """Values of very different sizes from page to page, and scores that rise from tile to tile."""
    case = make_case(torch.float16, 2, 8, 128, 8, group=64, split="rope", counts=(200,), rows=None, lengths=(1,))
    case.scaling *= 3
    check(case, run_cuda(case, monkeypatch))


@needs_gpu
def test_a_captured_call_follows_its_lengths():  # type: ignore[no-untyped-def]
    from hisparse.ops.decode import cuda

    sizes = {"counts": (50, 2), "rows": (20, 1), "lengths": (37, 3)}
    case = make_case(torch.bfloat16, 2, 4, 128, 8, group=64, split="rope", **sizes)
    device = _on_device(make_case(torch.bfloat16, 2, 4, 128, 8, group=64, split="rope", **sizes), "cuda")
    cuda.decode_attention(*device.arguments(), None, None, False, "rope")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = cuda.decode_attention(*device.arguments(), None, None, False, "rope")
    for used in (case, device):
        used.dense_len.sub_(2)
        used.kept.count.sub_(1)
    graph.replay()
    check(case, DecodeResult(*(None if x is None else x.cpu() for x in result)))


@needs_gpu
def test_an_early_start_changes_nothing(monkeypatch):  # type: ignore[no-untyped-def]
    """Steps with recall in a CUDA graph, whose rows come from the host again and again, with an early start and
    without."""
    from hisparse.bench.data import make_layer
    from hisparse.bench.past import Past
    from hisparse.bench.recall import Steps
    from hisparse.bench.shapes import SHAPES
    from hisparse.cache import decode

    monkeypatch.setenv("HISPARSE_BACKEND", "cuda")
    name = "glm4-9b-1m"
    steps = Steps(Past(name, make_layer(SHAPES[name], 8192, torch.device("cuda")), 8192, 5.0, True), drift=0.7)
    queries = steps.queries[:24]

    def replayed():  # type: ignore[no-untyped-def]
        steps.scan(queries[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [steps.scan(q) for q in queries]
        outs = []
        for _ in range(10):
            graph.replay()
            outs.append(torch.stack(results).double())
        return torch.stack(outs)

    early = replayed()
    assert decode.reserve(queries[:1], steps.dense_k) is not None
    monkeypatch.setattr(decode, "reserve", lambda *_: None)
    late = replayed()
    assert torch.equal(early, early[:1].expand_as(early))
    assert float(((early - late).norm(dim=-1) / late.norm(dim=-1)).max()) < 8e-3


@needs_gpu
def test_dense_slots_alone(monkeypatch):  # type: ignore[no-untyped-def]
    case = make_case(torch.bfloat16, 4, 8, 128, 8, split="never", counts=(0, 0), rows=None, lengths=(700, 3))
    case.kept = None
    check(case, run_cuda(case, monkeypatch, split="never"))


@pytest.mark.skipif(not _cuda.has_compiler(), reason="needs cuda-bindings and NVRTC")
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (128, 64), (128, 128), (256, 64)])
def test_it_compiles(dim, group):  # type: ignore[no-untyped-def]
    """No GPU needed."""
    source = _cuda.read_source("decode/decode.cu")
    for split, mass in itertools.product((0, 1), (0, 1)):
        sizes = SIZES | {"DIM": dim, "GROUP": group, "SPLIT": split, "MASS": mass, "TILES": 1, "STAGES": 2}
        options = [f"--define-macro={name}={value}" for name, value in sizes.items()]
        assert len(_cuda.compile_source(source, "decode.cu", "sm_90", options)) > 10_000
    source = _cuda.read_source("decode/combine.cu")
    for bf16 in (0, 1):
        options = [f"--define-macro=DIM={dim}", f"--define-macro=BF16={bf16}"]
        assert len(_cuda.compile_source(source, "combine.cu", "sm_90", options)) > 1000
