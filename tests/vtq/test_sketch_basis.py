"""The sketch basis: white keys, scores kept, important directions first; and its way through the calibration file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hisparse.errors import FormatError, ModelError
from hisparse.identity import ModelIdentity
from hisparse.vtq import ChannelStats, estimate_stats
from hisparse.vtq.basis import RIDGE, sketch_basis
from hisparse.vtq.calibration import FILE_VERSION, SINKS, calibrate, load_calibration, save_calibration


def samples(heads: int, count: int, dim: int, rank: int, seed: int) -> Tensor:
    """Rows [H, count, dim] of `rank` strong directions and a weak rest."""
    make = torch.Generator().manual_seed(seed)
    strong = torch.randn(heads, count, rank, generator=make) @ torch.randn(heads, rank, dim, generator=make)
    return (strong + 0.1 * torch.randn(heads, count, dim, generator=make)).double()


def moments(x: Tensor) -> Tensor:
    return x.mT @ x / x.shape[1]


@settings(max_examples=30, deadline=None)
@given(
    heads=st.integers(1, 3),
    dim=st.sampled_from([2, 8, 16, 40, 64]),
    rank=st.integers(1, 6),
    exponent=st.integers(-8, 8),
    seed=st.integers(0, 2**31),
)
def test_coordinates_are_white_and_ordered_by_what_queries_see(
    heads: int, dim: int, rank: int, exponent: int, seed: int
) -> None:
    keys = samples(heads, 400, dim, rank, seed) * 2.0**exponent
    queries = samples(heads, 300, dim, rank, seed + 1)
    covariance, moment = moments(keys - keys.mean(1, keepdim=True)), moments(queries)
    basis = sketch_basis(covariance, moment).double()
    assert basis.shape == (heads, dim, dim)
    level = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
    ridged = covariance + RIDGE * level[:, None, None] * torch.eye(dim, dtype=torch.float64)
    white = basis.mT @ ridged @ basis
    torch.testing.assert_close(white, torch.eye(dim, dtype=torch.float64).expand_as(white), atol=2e-3, rtol=0)
    inverse = torch.linalg.inv(basis)  # rows: what a unit of each coordinate adds to a key
    importance = inverse @ moment @ inverse.mT  # second moment of the queries' coordinates: diagonal, descending
    weights = importance.diagonal(dim1=-2, dim2=-1)
    assert bool((weights[:, 1:] <= weights[:, :-1] + 1e-3 * weights[:, :1]).all())
    off = importance - torch.diag_embed(weights)
    assert float((off.abs().amax((-1, -2)) / weights[:, 0]).max()) < 2e-3


def test_truncation_loses_less_of_the_scores_than_in_any_of_many_random_rotations() -> None:
    keys, queries = samples(1, 2000, 16, 5, 0), samples(1, 1000, 16, 5, 1)
    keys = keys - keys.mean(1, keepdim=True)
    basis = sketch_basis(moments(keys), moments(queries)).double()
    values, vectors = np.linalg.eigh(moments(keys)[0].numpy())
    whitening = torch.from_numpy(vectors / np.sqrt(values))

    def lost(columns: Tensor) -> float:
        y = keys[0] @ columns
        y[:, 4:] = 0
        return float((queries[0] @ (keys[0] - y @ torch.linalg.inv(columns)).T).square().mean())

    ours, make = lost(basis[0]), torch.Generator().manual_seed(2)
    for _ in range(50):
        rotation, _ = torch.linalg.qr(torch.randn(16, 16, generator=make, dtype=torch.float64))
        assert ours < lost(whitening @ rotation)


def test_degenerate_covariances_give_finite_bases() -> None:
    eye = torch.eye(8).expand(2, -1, -1)
    one = torch.zeros(2, 8, 8)
    one[:, 3, 3] = 1.0  # all keys along one axis
    for covariance in (torch.zeros(2, 8, 8), one, eye * 1e-20, eye * 1e8):
        for moment in (torch.zeros(2, 8, 8), one, eye):
            basis = sketch_basis(covariance, moment)
            assert basis.dtype == torch.float32
            assert bool(basis.isfinite().all())
            assert float(torch.linalg.cond(basis.double()).max()) < 1e6


@pytest.mark.parametrize("dim", [8, 64, 96])
@pytest.mark.parametrize("with_basis", [True, False])
def test_products_of_coordinates_are_scores(dim: int, with_basis: bool) -> None:
    k, v = torch.randn(2, 500, 2, dim, generator=torch.Generator().manual_seed(dim)) * 3 + 1
    q = torch.randn(500, 6, dim)
    stats = estimate_stats(k, v, torch.arange(dim), q)
    if not with_basis:
        stats = ChannelStats(stats.k_mean, stats.k_scale, stats.v_mean, stats.v_scale, stats.order)
    coordinates = torch.einsum("thd,hdc->htc", k - stats.k_mean, stats.sketch_basis)
    turned = torch.einsum("hgtd,hdc->hgtc", q.view(500, 2, 3, dim).permute(1, 2, 0, 3), stats.query_basis)
    found = torch.einsum("hgqc,htc->hgqt", turned, coordinates)
    exact = torch.einsum("qhgd,thd->hgqt", q.view(500, 2, 3, dim), k - stats.k_mean)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-2)


def test_few_queries_count_all_directions_alike() -> None:
    k, v = torch.randn(2, 300, 2, 16, generator=torch.Generator().manual_seed(0))
    none = estimate_stats(k, v, torch.arange(16))
    few = estimate_stats(k, v, torch.arange(16), torch.randn(7, 4, 16))  # 14 a KV head, fewer than 16 channels
    many = estimate_stats(k, v, torch.arange(16), torch.randn(8, 4, 16))
    assert few.key_basis is not None
    assert torch.equal(few.key_basis, none.key_basis)  # type: ignore[arg-type]
    assert not torch.equal(many.key_basis, none.key_basis)  # type: ignore[arg-type]


def test_bad_bases_are_refused_and_good_ones_counted() -> None:
    plain = ChannelStats.identity(2, 8)
    fields = (plain.k_mean, plain.k_scale, plain.v_mean, plain.v_scale, plain.order)
    eye = torch.eye(8).expand(2, -1, -1).contiguous()
    assert ChannelStats(*fields, key_basis=eye).nbytes == plain.nbytes + 2 * 8 * 8 * 4
    nan = eye.clone()
    nan[1, 2, 3] = float("nan")
    for bad in (eye[:1], eye[:, :4], eye[0], nan):
        with pytest.raises(FormatError, match=r"key_basis is .* it must be finite \[2, 8, 8\]"):
            ChannelStats(*fields, key_basis=bad)


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_calibration_measures_the_covariance_of_keys_and_the_moment_of_queries(llama: Any) -> None:
    windows = [torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(length)) for length in (70, 50)]
    stats = calibrate(llama, windows, span=70)  # the longer window starts at 0, the shorter at 20 or 0
    queries: list[list[Tensor]] = [[], []]
    keys: list[list[Tensor]] = [[], []]
    for ids, offset in ((windows[0], 0), (windows[1], 20)):
        cache = DynamicCache()
        positions = torch.arange(offset, offset + len(ids))[None]
        with torch.no_grad():
            hidden = llama(
                ids[None], position_ids=positions, past_key_values=cache, output_hidden_states=True
            ).hidden_states
            cos, sin = llama.model.rotary_emb(hidden[0], positions)
            for i, layer in enumerate(llama.model.layers):
                q = layer.self_attn.q_proj(layer.input_layernorm(hidden[i])).view(1, -1, 4, 16).transpose(1, 2)
                half = torch.cat([-q[..., 8:], q[..., :8]], -1)
                queries[i].append((q * cos[:, None] + half * sin[:, None])[0, :, SINKS:].double())
                keys[i].append(cache.layers[i].keys[0, :, SINKS:].double())
    for i, s in enumerate(stats):
        k, q = torch.cat(keys[i], 1), torch.cat(queries[i], 1)
        centred = k - k.mean(1, keepdim=True)
        grouped = q.reshape(2, -1, 16)
        want = sketch_basis(moments(centred), moments(grouped)).half().float()
        assert s.key_basis is not None
        # eigenvectors are free in their sign
        sign = (s.key_basis * want).sum(1, keepdim=True).sign()
        torch.testing.assert_close(s.key_basis, want * sign, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
    assert llama.config._attn_implementation == "sdpa"


def test_the_file_gives_back_the_very_basis(llama: Any, tmp_path: Path) -> None:
    stats, identity = calibrate(llama, [torch.arange(60)]), ModelIdentity.of(llama)
    path = tmp_path / "a.safetensors"
    save_calibration(path, stats, identity, "a test")
    for saved, read in zip(stats, load_calibration(path, identity), strict=True):
        assert saved.key_basis is not None
        assert read.key_basis is not None
        assert read.key_basis.dtype == torch.float32
        assert torch.equal(saved.key_basis, read.key_basis)


def test_a_file_without_or_with_a_broken_basis_is_refused(llama: Any, tmp_path: Path) -> None:
    identity, path = ModelIdentity.of(llama), tmp_path / "a.safetensors"
    save_calibration(path, calibrate(llama, [torch.arange(60)]), identity, "a test")
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    metadata = {"kind": "hisparse.calibration", "version": FILE_VERSION, **identity.to_metadata()}
    basis = tensors.pop("key_basis")
    inf = basis.clone()
    inf[0, 0, 0, 0] = float("inf")
    for content, message in (
        (tensors, "has no key_basis; make it anew with `hisparse calibrate`"),
        ({**tensors, "key_basis": basis[..., :8].contiguous()}, "damaged .*key_basis"),
        ({**tensors, "key_basis": basis[:1].contiguous()}, "damaged"),
        ({**tensors, "key_basis": inf}, "damaged .*key_basis"),
    ):
        save_file(content, path, metadata)
        with pytest.raises(ModelError, match=message):
            load_calibration(path, identity)
    save_file({**tensors, "key_basis": basis}, path, {**metadata, "version": "1"})
    with pytest.raises(ModelError, match="version '1', this hisparse reads 2; make it anew with `hisparse calibrate`"):
        load_calibration(path, identity)
