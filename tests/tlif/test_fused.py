"""TLIF's GPU kernel against the network in float64; in the interpreter without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hisparse.tlif.network import Tlif
from hisparse.tlif.scorer import TlifScorer
from hisparse.tlif.statistics import network_inputs

fused = pytest.importorskip("hisparse.tlif.fused")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def network_and_rows(features: int, rows: int, seed: int) -> tuple[Tlif, torch.Tensor]:
    torch.manual_seed(seed)
    network = Tlif(features)
    with torch.no_grad():
        network.first.weight.mul_(3)
    return network, (torch.randn(rows, features) + torch.randn(features)).bfloat16()


def exact(network: Tlif, values: torch.Tensor, recent: torch.Tensor, prefix: int) -> torch.Tensor:
    with torch.no_grad():
        inputs = network_inputs(values.double(), recent.double(), prefix)
        logits = torch.nn.functional.linear(inputs, network.first.weight.double(), network.first.bias.double())
        hidden = torch.nn.functional.gelu(logits)
        second = torch.nn.functional.linear(hidden, network.second.weight.double(), network.second.bias.double())
        return second.squeeze(1).sigmoid()


def weights_of(network: Tlif) -> fused.FusedWeights:
    parameters = (network.first.weight, network.first.bias, network.second.weight, network.second.bias)
    return fused.FusedWeights(*(p.detach().to(DEVICE) for p in parameters))


@pytest.fixture(scope="module", autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that a kernel is to fill holds NaN before."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", filled)
        yield


@settings(max_examples=25, deadline=None)
@given(
    features=st.sampled_from([64, 96, 128, 192, 512, 1024]),
    prefix=st.sampled_from([1, 16, 128, 192]),
    tokens=st.integers(0, 200),
    past=st.integers(0, 192),
    queries=st.sampled_from([64, 128]),
    seed=st.integers(0, 2**31),
)
@example(features=512, prefix=128, tokens=200, past=128, queries=128, seed=0)
@example(features=512, prefix=128, tokens=150, past=3, queries=64, seed=1)
@example(features=512, prefix=1, tokens=129, past=0, queries=128, seed=2)
@example(features=64, prefix=192, tokens=200, past=192, queries=64, seed=3)
@example(features=128, prefix=128, tokens=200, past=128, queries=128, seed=4)
@example(features=192, prefix=128, tokens=200, past=128, queries=128, seed=5)
@example(features=1024, prefix=128, tokens=200, past=128, queries=128, seed=6)
@example(features=1024, prefix=192, tokens=150, past=3, queries=64, seed=7)
def test_importance_is_the_networks(
    features: int, prefix: int, tokens: int, past: int, queries: int, seed: int
) -> None:
    past = min(past, prefix)
    network, rows = network_and_rows(features, past + tokens, seed)
    recent, values = rows[:past], rows[past:]
    weights = weights_of(network)
    queries = queries if weights.holds_many(prefix) else 64
    found = weights.importance(values.to(DEVICE), recent.to(DEVICE), prefix, queries)
    torch.testing.assert_close(found.cpu().double(), exact(network, values, recent, prefix), rtol=0, atol=2e-6)


def matrix_unit(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """``a @ b + total`` as Hopper's matrix units sum: 16 products a step, aligned to the largest nominal exponent, cut
    off two bits below float32. (This model gave the H200's results bit for bit.)"""

    def exponent(x: np.ndarray) -> np.ndarray:
        return np.where(x == 0, -200, np.frexp(x)[1] - 1)

    a, b, total = (x.astype(np.float64) for x in (a, b, total))
    for k in range(0, a.shape[1], 16):
        terms = np.concatenate([a[:, k : k + 16, None] * b[None, k : k + 16], total[:, None]], 1)
        nominal = (exponent(a[:, k : k + 16])[:, :, None] + exponent(b[k : k + 16])[None]).max(1)
        unit = np.exp2(np.maximum(nominal, exponent(total)) - 25.0)
        total = (np.trunc(terms / unit[:, None]) * unit[:, None]).sum(1)
        unit = np.exp2(exponent(total) - 23.0)
        total = np.trunc(total / unit) * unit
    return total.astype(np.float32)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has matrix units of its own")
@pytest.mark.parametrize("features", [128, 512])
def test_sums_of_matrix_units_are_exact_enough(features: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        return interpreter.TensorHandle(matrix_unit(a.data, b.data, total.data), total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    network, rows = network_and_rows(features, 200, 3)
    found = weights_of(network).importance(rows[128:], rows[:128], 128)
    torch.testing.assert_close(found.double(), exact(network, rows[128:], rows[:128], 128), rtol=0, atol=5e-7)


def test_rows_of_zeros_and_single_rows_have_importance_too() -> None:
    network, rows = network_and_rows(64, 70, 1)
    rows[10:30] = 0
    want = exact(network, rows, rows[:0], 16)
    found = weights_of(network).importance(rows.to(DEVICE), rows[:0].to(DEVICE), 16)
    torch.testing.assert_close(found.cpu().double(), want, rtol=0, atol=2e-6)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the scorer takes the kernel on a GPU only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scoring_on_the_gpu_in_pieces_is_scoring_at_once_on_the_cpu(dtype: torch.dtype) -> None:
    network, rows = network_and_rows(512, 3000, 2)
    scorer, rows = TlifScorer(network, 128), rows.to(dtype)
    want, _ = scorer.score(rows, None)
    state, parts = None, []
    for piece in rows.to(DEVICE).split([1, 700, 128, 2171]):
        part, state = scorer.score(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts).cpu(), want, rtol=0, atol=1e-5)


def test_only_rows_and_windows_that_were_checked_are_taken() -> None:
    rows = torch.zeros(1, 512, dtype=torch.bfloat16)
    assert fused.serves(rows, 192)
    assert not fused.serves(rows, 193)
    assert fused.serves(rows[:, :64], 128)
    assert fused.serves(torch.cat([rows, rows], 1), 128)
    assert not fused.serves(rows[:, :80], 128)
    assert not fused.serves(rows.float(), 128)
