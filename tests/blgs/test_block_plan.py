from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from blgs_oracle import expected_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hisparse.blgs import BlockPlan, plan_blocks, plan_fixed_blocks
from hisparse.config import BlgsConfig
from hisparse.errors import FormatError, InputError

DEFAULT = BlgsConfig()
UGLY = [0, 1, 5, 7, 8, 9, 63, 123, 255, 256, 257, 1000, 3001]


def clustered(length: int, seed: int, share: float = 0.05) -> Tensor:
    """Importance with a low floor and clumps of high values."""
    draw = torch.Generator().manual_seed(seed)
    logit = torch.randn(length, generator=draw) * 0.7 - 3
    for centre in torch.randint(0, max(length, 1), (round(length * share / 6),), generator=draw).tolist():
        logit[max(0, centre - 4) : centre + 5] += torch.rand(1, generator=draw) * 4
    return torch.sigmoid(logit)


def same(plan: BlockPlan, other: BlockPlan) -> bool:
    names = ("keep", "anchor", "modes", "start", "tokens", "channel_width", "level", "kept", "distance")
    return plan.demoted == other.demoted and all(torch.equal(getattr(plan, n), getattr(other, n)) for n in names)


def against_oracle(p: Tensor, threshold: float, config: BlgsConfig, limit: int | None) -> BlockPlan:
    plan = plan_blocks(p, threshold, config, 192, limit)
    plan.check_integrity(lambda text: None)
    want = expected_plan(p.numpy().astype(np.float32), threshold, config, limit)
    assert plan.modes.tolist() == want.modes
    assert plan.anchor.tolist() == want.anchor
    got = zip(*(getattr(plan, n).tolist() for n in ("start", "tokens", "level", "kept", "distance")), strict=True)
    assert list(got) == want.blocks
    assert plan.keep.tolist() == want.keep
    assert plan.demoted == want.demoted
    assert plan.channel_width.tolist() == [min(192, config.min_block_size << row[2]) for row in want.blocks]
    if limit is not None:
        assert plan.n_kept <= limit
    return plan


@pytest.mark.parametrize("limit", [None, 0, 3, 100], ids=lambda x: f"limit-{x}")
@pytest.mark.parametrize("length", UGLY)
def test_equals_token_by_token_oracle(length: int, limit: int | None) -> None:
    against_oracle(clustered(length, seed=length), 0.32, DEFAULT, limit)


@pytest.mark.parametrize("weight", [0.0, 0.3, 0.72, 0.95, 1.0])
@pytest.mark.parametrize(("low", "high"), [(8, 256), (1, 16), (1, 1), (8, 8), (64, 64), (16, 1024)])
def test_equals_oracle_for_every_block_size_and_weight(low: int, high: int, weight: float) -> None:
    config = BlgsConfig(min_block_size=low, max_block_size=high, bandwidth_weight=weight)
    for length in (1, 5, 63, 700):
        against_oracle(clustered(length, seed=length + low), 0.32, config, None)


# Few distinct values: ties everywhere, so the order of equal tokens shows.
@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.01, 0.2, 0.32, 0.5, 0.999]), max_size=400),
    threshold=st.sampled_from([0.0, 0.2, 0.32, 0.6, 1.0]),
    weight=st.sampled_from([0.0, 0.5, 0.72, 1.0]),
    limit=st.none() | st.integers(0, 400),
)
def test_property_equals_oracle_with_ties(
    values: list[float], threshold: float, weight: float, limit: int | None
) -> None:
    config = BlgsConfig(max_block_size=64, bandwidth_weight=weight)
    against_oracle(torch.tensor(values, dtype=torch.float32), threshold, config, limit)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 20000), limit=st.none() | st.integers(0, 5000))
def test_property_invariants_at_length(seed: int, length: int, limit: int | None) -> None:
    p = clustered(length, seed, share=0.03)
    plan = plan_blocks(p, 0.32, DEFAULT, 512, limit)
    plan.check_integrity(lambda text: None)
    assert limit is None or plan.n_kept <= limit
    free = plan_blocks(p, 0.32, DEFAULT, 512)
    assert plan.n_kept == min(free.n_kept, plan.n_kept if limit is None else limit) or plan.demoted > 0
    if 0 < plan.n_anchors < length:
        assert p[plan.anchor].min() >= p[~plan.anchor].max()
    assert same(plan, plan_blocks(p, 0.32, DEFAULT, 512, limit))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(2**-20, 1 - 2**-20, width=32) | st.sampled_from([0.25, 0.75]), min_size=1, max_size=8),
    threshold=st.floats(0, 1),
    weight=st.sampled_from([0.0, 0.72, 1.0]),
    limit=st.none() | st.integers(0, 9),
)
def test_short_path_equals_general_path(
    values: list[float], threshold: float, weight: float, limit: int | None, monkeypatch_short: pytest.MonkeyPatch
) -> None:
    p = torch.tensor(values, dtype=torch.float32)
    config = BlgsConfig(bandwidth_weight=weight)
    short = plan_blocks(p, threshold, config, 192, limit)
    with monkeypatch_short.context() as patch:
        patch.setattr("hisparse.blgs.planner._SHORT", 0)
        assert same(short, plan_blocks(p, threshold, config, 192, limit))


@pytest.fixture(scope="module")
def monkeypatch_short() -> pytest.MonkeyPatch:
    return pytest.MonkeyPatch()


def test_threshold_is_compared_in_float32_on_both_paths() -> None:
    for length in (3, 300):
        p = torch.full((length,), 0.32)
        assert plan_blocks(p, 0.32, DEFAULT, 64).n_anchors == length


def test_density_falls_and_blocks_grow_with_distance() -> None:
    p = torch.full((4096,), 0.1)
    p[2048] = 0.9
    plan = plan_blocks(p, 0.32, DEFAULT, 512)
    right = plan.start >= 2048
    distance, tokens, density = plan.distance[right], plan.tokens[right], plan.block_density[right]
    assert plan.modes.tolist() == [2048]
    assert (distance[1:] > distance[:-1]).all()
    assert (tokens[1:] >= tokens[:-1]).all()
    assert (density[1:] <= density[:-1]).all()
    assert tokens[0] == 8
    assert density[0] == 1
    assert tokens[-1] == 256
    assert density[-1] < 0.01


def test_weight_zero_keeps_all_and_one_keeps_only_anchors_and_the_blocks_at_modes() -> None:
    p = clustered(5000, 1)
    assert plan_blocks(p, 0.32, BlgsConfig(bandwidth_weight=0.0), 64).n_kept == 5000
    plan = plan_blocks(p, 0.32, BlgsConfig(bandwidth_weight=1.0), 64)
    near = torch.zeros(5000, dtype=torch.bool)
    for mode in plan.modes.tolist():
        near[mode // 8 * 8 : mode // 8 * 8 + 8] = True
    assert torch.equal(plan.keep, plan.anchor | near)


def test_limit_gives_up_non_anchors_first_then_the_weakest_anchors() -> None:
    p = clustered(4000, 2)
    free = plan_blocks(p, 0.32, DEFAULT, 64)
    assert free.n_anchors < free.n_kept
    some = plan_blocks(p, 0.32, DEFAULT, 64, (free.n_anchors + free.n_kept) // 2)
    assert torch.equal(some.anchor, free.anchor)
    assert some.n_kept == (free.n_anchors + free.n_kept) // 2
    few = plan_blocks(p, 0.32, DEFAULT, 64, free.n_anchors // 2)
    assert few.n_kept == few.n_anchors == free.n_anchors // 2
    assert few.demoted == free.n_anchors - few.n_anchors
    assert p[few.anchor].min() >= p[free.anchor & ~few.anchor].max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type(dtype: torch.dtype) -> None:
    p = clustered(500, 3).to(dtype).clamp(0.01, 0.99)
    assert same(plan_blocks(p, 0.32, DEFAULT, 64), plan_blocks(p.float(), 0.32, DEFAULT, 64))


@pytest.mark.parametrize("length", [4, 400])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1.0, -0.1, 1.5])
def test_value_outside_the_open_interval_is_refused(length: int, value: float) -> None:
    p = torch.full((length,), 0.5)
    p[3] = value
    for call in (lambda: plan_blocks(p, 0.32, DEFAULT, 64), lambda: plan_fixed_blocks(p)):
        with pytest.raises(FormatError, match=r"importance\[3\]"):
            call()


def test_wrong_shape_type_and_limits_are_refused() -> None:
    good = torch.full((9,), 0.5)
    with pytest.raises(FormatError, match="shape"):
        plan_blocks(good[None], 0.32, DEFAULT, 64)
    for length in (2, 20):
        with pytest.raises(FormatError, match="int64"):
            plan_blocks(torch.ones(length, dtype=torch.int64), 0.32, DEFAULT, 64)
    with pytest.raises(InputError, match="channels = 0"):
        plan_blocks(good, 0.32, DEFAULT, 0)
    with pytest.raises(InputError, match="keep_limit = -1"):
        plan_blocks(good, 0.32, DEFAULT, 64, -1)
    with pytest.raises(InputError, match="NaN"):
        plan_blocks(good, float("nan"), DEFAULT, 64)
    with pytest.raises(InputError, match="block = 0"):
        plan_fixed_blocks(good, block=0)


@pytest.mark.parametrize("length", UGLY)
def test_fixed_blocks_keep_whole_blocks_within_the_limit(length: int) -> None:
    p = clustered(length, seed=length)
    for limit in (None, 0, 63, 64, 130, length):
        plan = plan_fixed_blocks(p, 64, limit, channels=192)
        plan.check_integrity(lambda text: None)
        assert limit is None or plan.n_kept <= limit
        assert all(k in (0, n) for k, n in zip(plan.kept.tolist(), plan.tokens.tolist(), strict=True))
        mean = [float(p[s : s + 64].double().mean()) for s in range(0, length, 64)]
        chosen = [m for m, k in zip(mean, plan.kept.tolist(), strict=True) if k]
        left = [m for m, k in zip(mean, plan.kept.tolist(), strict=True) if not k]
        assert not chosen or not left or min(chosen) >= max(left) - 1e-6


def test_tiles_are_counted_per_block_and_channel_range() -> None:
    p = torch.full((512,), 0.1)
    p[3] = 0.9
    plan = plan_blocks(p, 0.32, DEFAULT, 100)
    want = sum(-(-100 // min(100, int(n))) for n in plan.tokens)
    assert plan.n_tiles == want
    assert plan.n_blocks == 7  # 8 8 16 32 64 128 256


def test_integrity_check_prints_and_finds_a_broken_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_blocks(clustered(300, 4), 0.32, DEFAULT, 64)
    plan.check_integrity()
    assert f"sum of tokens {plan.length}" in capsys.readouterr().out
    plan.keep[plan.anchor.nonzero()[0, 0]] = False
    with pytest.raises(RuntimeError, match="kept"):
        plan.check_integrity()


def test_json_holds_the_whole_partition() -> None:
    plan = plan_blocks(clustered(777, 5), 0.32, DEFAULT, 64)
    data = json.loads(plan.to_json())
    assert sum(data["block"]["tokens"]) == data["tokens"] == 777
    assert sum(data["block"]["kept"]) == data["kept"] == plan.n_kept
    assert data["tiles"] == plan.n_tiles


def test_gpu_plan_equals_cpu_plan() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for length in (5, 3001, 200000):
        p = clustered(length, seed=length)
        for limit in (None, length // 20):
            cuda = plan_blocks(p.cuda(), 0.32, DEFAULT, 512, limit)
            assert cuda.keep.is_cuda
            assert same(cuda.to("cpu"), plan_blocks(p, 0.32, DEFAULT, 512, limit))
