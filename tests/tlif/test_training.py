"""Training and scores against other formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.tlif.network import inputs_of
from hisparse.tlif.training import Examples, auc, platt, train

FEATURES = 6


def pairwise_auc(scores: list[int], targets: list[bool]) -> float:
    pairs = [
        (a > b) + 0.5 * (a == b)
        for a, up in zip(scores, targets, strict=True)
        if up
        for b, down in zip(scores, targets, strict=True)
        if not down
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=40))
def test_auc_counts_pairs(items: list[tuple[int, bool]]) -> None:
    scores, targets = [score for score, _ in items], [target for _, target in items]
    found = auc(torch.tensor(scores, dtype=torch.float32), torch.tensor(targets).float())
    assert found == pytest.approx(pairwise_auc(scores, targets), nan_ok=True)


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (2.5, -1.0), (0.3, 2.0)])
def test_platt_finds_the_law_that_made_the_targets(slope: float, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40_000, generator=generator)
    targets = (torch.rand(40_000, generator=generator) < torch.sigmoid(slope * logits + offset)).float()
    found = platt(logits, targets)
    assert found == pytest.approx((slope, offset), abs=0.1)
    mean = float(torch.sigmoid(found[0] * logits + found[1]).mean())
    assert mean == pytest.approx(float(targets.mean()), abs=1e-4)


def test_platt_survives_separable_and_constant_targets() -> None:
    logits = torch.linspace(-3, 3, 63)
    for targets in ((logits > 0).float(), torch.zeros(63), (logits < 0).float()):
        slope, offset = platt(logits, targets)
        assert slope > 0
        assert math.isfinite(offset)


def test_a_tenth_of_a_window_counts_and_unlabelled_tokens_do_not() -> None:
    labels = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    labels[:500] = torch.nan
    inputs = torch.arange(1000.0).unsqueeze(1)
    examples = Examples.of_window(inputs, labels)
    assert len(examples) == 500
    assert int(examples.targets.sum()) == 50
    assert torch.equal(examples.inputs, inputs[500:])
    assert labels[500:][examples.targets > 0].min() >= labels[500:].topk(50).values.min()
    assert ((examples.graded >= 0.5) == (examples.targets > 0.5)).all()


def learnable(tokens: int, seed: int) -> Examples:
    inputs = torch.randn(tokens, inputs_of(FEATURES), generator=torch.Generator().manual_seed(seed))
    inputs[:, 3] = 7.0  # constant
    return Examples.of_window(inputs, inputs[:, 0] + inputs[:, 1].square())


def test_training_learns_calibrates_and_repeats_itself() -> None:
    examples, validation, test = learnable(5000, 0), learnable(2000, 1), learnable(2000, 2)
    steps: list[tuple[int, int]] = []
    torch.manual_seed(0)
    state = torch.get_rng_state()
    network = train(examples, validation, FEATURES, 30, 0, lambda step, of: steps.append((step, of)))
    again = train(examples, validation, FEATURES, 30, 0, lambda step, of: None)
    assert torch.equal(torch.get_rng_state(), state)
    assert steps[-1][0] == steps[-1][1] == len(steps)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    importance = network(test.inputs).sigmoid()
    assert auc(importance, test.targets) > 0.95
    assert float(importance.mean()) == pytest.approx(0.1, abs=0.02)
    assert not network.first.weight[:, 3].any(), "a constant input must not count once it varies"
