"""A GPU that is not there: what it would run in an engine runs on the CPU.

`pretend` comes before anything else of HiSparse is imported. Kernels in CUDA C++ then run in the emulator
(``tests/emulator``), Triton's in its interpreter. Replaced as well, by what does the same to the results:

- graphs of packing: a replay calls again what was captured, on the graph's own inputs;
- the side stream that brings rows of the host: its copies are made when they are asked for;
- FlashAttention 3, which has the strides of vLLM's function and is computed in float64;
- steps of single tokens are filled up with requests that have no tokens, as for CUDA graphs, by vLLM's own code.

Memory that was not written holds nonsense: what ``torch.empty`` and its like give HiSparse, the pool of blocks and the
rows of the host.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "emulator"))
import emulator

OPS = ("attend", "decode", "fetch", "pack", "scan", "select", "sketch", "unpack")


class Way:
    """How the engines of this process run. twins: "cuda", "triton" or "reference"; reference: for the moment, to
    compare with; padded: steps are filled up; processors: of the device; fast: FlashAttention 3 is there; pages: those
    that the kernel unpacks, or programs that pack, None for all, each of which takes the interpreter long;
    warming: an engine warms up, with what nobody has written; tlif: models have one."""

    twins = "cuda"
    reference = False
    padded = True
    processors = 6
    fast = True
    pages: list[int] | None = None
    warming = False
    tlif = False


LAUNCHED: Counter[str] = Counter()
"""Launches of each kernel: "ops/scan/step.cu:scan_and_choose", "ops/fetch/triton.py:move"."""


@contextmanager
def reference() -> Iterator[None]:
    """Within, every operation is the reference."""
    before, Way.reference = Way.reference, True
    try:
        yield
    finally:
        Way.reference = before


def pretend(folder: Path) -> None:
    """Everything of the module; compiled kernels are kept in `folder`. Raises AssertionError where it is too late."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.pop("HISPARSE_BACKEND", None)
    _keep_binaries(folder)
    _dispatch()
    _note_triton()
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=Way.processors)  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    _dirty_memory()
    _operations()
    _scorer()
    _plugin()


def _keep_binaries(folder: Path) -> None:
    compile_ = emulator._gcc

    def once(*arguments: Any) -> None:
        target = Path(arguments[arguments.index("-o") + 1])
        if not target.exists():
            compile_(*arguments)

    emulator._gcc = once
    header = folder / "model.h"
    header.write_text('#include "device.h"\n#include "instructions.h"\n')
    once("-o", header.with_suffix(".h.gch"), "-x", "c++-header", header)
    emulator._folder = lambda: (folder, None)


def _dispatch() -> None:
    """Twins are chosen as for a tensor on a GPU that can run all of them."""
    from hisparse.ops import _cuda, _dispatch

    assert not [op for op in OPS if f"hisparse.ops.{op}" in sys.modules], "operations know their dispatcher already"
    on_cuda = _dispatch.ON_CUDA

    def backend_for(op: str, device: torch.device) -> str:
        if Way.reference or Way.twins == "reference":
            return "reference"
        return next(twin for twin in on_cuda[op] if twin == "triton" or Way.twins == "cuda")

    _dispatch.backend_for = backend_for  # type: ignore[assignment]
    _cuda.load_kernel = load_kernel  # type: ignore[assignment]
    _cuda.can_run = lambda index: True  # type: ignore[assignment]


class _Noted(emulator.EmulatedKernel):
    """Counts its launches."""

    path = ""

    def __call__(self, *arguments: Any, **options: Any) -> None:
        super().__call__(*arguments, **options)
        LAUNCHED[f"ops/{self.path}:{self.name}"] += 1


@cache
def _loaded(path: str, function: str, macros: tuple[tuple[str, int], ...]) -> _Noted:
    kernel = _Noted(emulator.read_source(path), function, dict(macros))
    kernel.path = path
    return kernel


def load_kernel(
    path: str, function: str, defines: dict[str, int] | None = None, registers: int | None = None, device: Any = None
) -> _Noted:
    """Takes the place of :func:`hisparse.ops._cuda.load_kernel`."""
    return _loaded(path, function, tuple(sorted((defines or {}).items())))


class _Some(int):
    """So many programs, of which the interpreter runs those chosen."""

    chosen: list[int]


def _note_triton() -> None:
    from triton.runtime import interpreter
    from triton.runtime.jit import KernelInterface

    take = KernelInterface.__getitem__
    interpreter.range = lambda *ends: ends[0].chosen if isinstance(ends[0], _Some) else range(*ends)

    def noted(kernel: Any, grid: Any) -> Any:
        if Way.pages is not None and kernel.fn.__name__ in ("_pack", "_unpack"):
            some = _Some(grid[0])
            some.chosen = Way.pages
            grid = (some, *grid[1:])
        run = take(kernel, grid)

        def start(*arguments: Any, **options: Any) -> Any:
            # It waits for the kernels ahead: what is launched next sees all that they wrote.
            emulator.EmulatedKernel._changed = ()
            name = f"{kernel.fn.__module__.removeprefix('hisparse.').replace('.', '/')}.py:{kernel.fn.__name__}"
            LAUNCHED[name] += 1
            return run(*arguments, **options)

        return start

    KernelInterface.__getitem__ = noted


def nonsense(x: Tensor) -> Tensor:
    """`x`, filled: NaN, or 0x55 in every byte."""
    if x.is_meta or not x.numel() or x.dtype == torch.bool:
        return x
    return x.fill_(float("nan")) if x.is_floating_point() else x.fill_(int.from_bytes(b"\x55" * x.element_size()))


def _dirty_memory() -> None:
    def dirty(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            x = make(*arguments, **options)
            return nonsense(x) if sys._getframe(1).f_globals.get("__name__", "").startswith("hisparse.") else x

        return made

    torch.empty, torch.empty_like = dirty(torch.empty), dirty(torch.empty_like)
    torch.Tensor.new_empty = dirty(torch.Tensor.new_empty)  # type: ignore[method-assign]


def _operations() -> None:
    """What chunks attend with, and rows of the host on their way."""
    from hisparse.ops.attend import flash3, triton

    host = triton._Host

    def start(self: Any) -> None:
        piece = self.pieces[self.started]
        target = self.buffers[self.started % 2][: piece.count * piece.part.fmt.page_bytes]
        self.started += 1
        self._copy(piece, target.view(-1, piece.part.fmt.page_bytes))
        self.ready.append((target.view(-1, piece.part.fmt.page_bytes), None))

    host._start = start  # type: ignore[method-assign]
    triton._runs = lambda ids: None  # as for numbers on the device
    triton.choose_library = lambda q, chunk: "flash3" if flash3.serves(q) else "plain"


def _scorer() -> None:
    """A network with random weights, which a kernel reads."""
    from hisparse.integrations.vllm import companions
    from hisparse.tlif.fused import FusedWeights, serves
    from hisparse.tlif.network import Tlif
    from hisparse.tlif.scorer import TlifScorer

    find = companions.scorer_for

    def scorer_for(identity: Any, *others: Any) -> Any:
        if not Way.tlif:
            return find(identity, *others)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return TlifScorer(Tlif(identity.value_features), 24)

    def fused(self: Any, values: Tensor) -> Any:
        if Way.reference or Way.twins == "reference" or not serves(values, self.prefix_length):
            return None
        return self._kernel.setdefault(values.device, FusedWeights(*self._on(values.device)))

    companions.scorer_for = scorer_for
    TlifScorer._fused = fused  # type: ignore[method-assign]


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, most_q: int, ends_q: Tensor, most_k: int, ends_k: Tensor,
    softmax_scale: float, causal: bool, out: Tensor, return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :data:`hisparse.ops.attend.flash3.Varlen`, of one sequence."""
    assert q.stride(2) == k.stride(2) == v.stride(2) == out.stride(2) == 1
    assert ends_q.tolist() == [0, len(q)]
    assert ends_k.tolist() == [0, len(k)]
    assert (most_q, most_k, return_softmax_lse) == (len(q), len(k), True)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    scores = q.double().transpose(0, 1) @ keys.mT * softmax_scale
    if causal:
        scores.masked_fill_(~torch.ones(len(q), len(k), dtype=torch.bool).tril_(len(k) - len(q)), float("-inf"))
    out.copy_((scores.softmax(-1) @ values).transpose(0, 1))
    return out, scores.logsumexp(-1).float()


def _plugin() -> None:
    """The engine's own."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from hisparse.integrations.vllm import backend, memory, packing, runtime, warm

    runtime.STATIC = ("cpu",)  # type: ignore[assignment]
    runtime.flash_attention_3 = lambda: flash_attention if Way.fast and Way.twins != "reference" else None
    create, make = memory.LayerMemory.__init__, memory.host_pool

    def created(self: Any, layout: Any, config: Any, blocks: Tensor, *others: Any, **more: Any) -> None:
        blocks.view(torch.uint8).fill_(0xFF)  # read as dense tokens, not a number
        create(self, layout, config, blocks, *others, **more)

    def dirty_pool(*arguments: Any) -> tuple[Tensor, Tensor]:
        pool, pinned = make(*arguments)
        return nonsense(pool), pinned

    memory.LayerMemory.__init__ = created  # type: ignore[method-assign]
    memory.host_pool = dirty_pool
    packing.Packer._capture = _capture  # type: ignore[method-assign]
    warm.PAST, warm.CHUNK = 3, 48  # no other calls than with more
    packing.TOGETHER = (2, 1)
    warm_up = runtime.Runtime._warm_up

    def warming(self: Any) -> None:
        Way.warming = True
        warm.TOGETHER = packing.TOGETHER if Way.twins == "cuda" else ()  # Triton's interpreter packs slowly
        warm_up(self)
        Way.warming = False

    runtime.Runtime._warm_up = warming  # type: ignore[method-assign]
    build = GPUModelRunner._build_attention_metadata

    def padded(self: Any, *arguments: Any, **options: Any) -> Any:
        if Way.padded and options["max_query_len"] == 1:
            size = min(1 << (options["num_reqs"] - 1).bit_length(), self.max_num_reqs)
            options |= {"num_reqs_padded": size, "num_tokens_padded": size}
        return build(self, *arguments, **options)

    GPUModelRunner._build_attention_metadata = padded
    backend.HiSparseAttention.forward = _with_padding(backend.HiSparseAttention.forward)  # type: ignore[method-assign]


class _Replayed:
    """Takes the place of `packing._Graph`: capturing runs nothing, a replay everything."""

    def __init__(self, layers: list[Any], full: Any, decide: Any) -> None:
        from hisparse.integrations.vllm.packing import Full, Place

        place = Place(full.place.block.clone(), full.place.slot.clone())
        self.layers, self.decide, self.full = layers, decide, Full(full.blocks.clone(), place, full.first)
        self.packing: Any = None

    def replay(self, full: Any) -> None:
        from hisparse.integrations.vllm.packing import pack_layers

        self.full.blocks.copy_(full.blocks)
        self.full.place.block.copy_(full.place.block)
        self.full.place.slot.copy_(full.place.slot)
        self.packing = pack_layers(self.layers, self.full, self.decide, check=False)


def _capture(self: Any, full: Any) -> None:
    self._captured[len(full), full.first] = _Replayed(self.layers, full, self.decide)


def _with_padding(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Queries, keys and values of the requests that fill up a batch: anything, as far apart as the others are."""

    own = torch.Generator().manual_seed(0)

    def wide(x: Tensor, number: int) -> Tensor:
        line = x.stride(0)
        memory = nonsense(torch.empty(number * line, dtype=x.dtype))
        found = memory.as_strided((number, *x.shape[1:]), x.stride())
        found[: len(x)] = x
        found[len(x) :] = torch.randn(found[len(x) :].shape, generator=own).to(x.dtype)
        return found

    def attend(
        self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any, output: Tensor,
        *others: Any, **more: Any,
    ) -> Tensor:  # fmt: skip
        single = None if metadata is None else metadata.single
        if single is None or metadata.singles is not None or len(single.past) <= len(query):
            return forward(self, layer, query, key, value, cache, metadata, output, *others, **more)
        number = len(single.past)
        query, key, value = (wide(x, number) for x in (query, key, value))
        whole = nonsense(torch.empty(number, *output.shape[1:], dtype=output.dtype))
        forward(self, layer, query, key, value, cache, metadata, whole, *others, **more)
        assert bool(whole.isfinite().all()), "attention is not a number"
        return output.copy_(whole[: len(output)])

    return attend
