"""Scorers: pieces, states, calibration in the mean, parameter limit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse.errors import ModelError
from hisparse.tlif import PARAMETER_LIMIT, NoveltyScorer, RandomScorer, Scorer, Tlif, TlifScorer, hidden_width
from hisparse.tlif.statistics import network_inputs

FEATURES = 24


def scorers(prefix: int = 16) -> list[Scorer]:
    torch.manual_seed(3)
    network = Tlif(FEATURES)
    torch.nn.init.normal_(network.first.weight, std=0.3)
    torch.nn.init.normal_(network.second.weight, std=0.3)
    return [TlifScorer(network, prefix), NoveltyScorer(prefix), RandomScorer(5)]


def rows(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, FEATURES, generator=torch.Generator().manual_seed(seed)) + 0.2


@pytest.mark.parametrize("scorer", scorers(), ids=lambda scorer: scorer.name)
class TestEveryScorer:
    @settings(max_examples=25, deadline=None)
    @given(cuts=st.lists(st.integers(0, 123), max_size=8))
    def test_pieces_give_what_one_call_gives(self, scorer: Scorer, cuts: list[int]) -> None:
        values = rows(123)
        whole, _ = scorer.score(values, None)
        state, parts = None, []
        edges = [0, *sorted(cuts), 123]
        for low, high in itertools.pairwise(edges):
            part, state = scorer.score(values[low:high], state)
            parts.append(part)
        assert state is not None
        assert state.seen == 123
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)

    def test_one_token_at_a_time_gives_what_one_call_gives(self, scorer: Scorer) -> None:
        values = rows(63)
        whole, _ = scorer.score(values, None)
        state, parts = None, []
        for row in values:
            part, state = scorer.score(row.unsqueeze(0), state)
            parts.append(part)
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=0)

    def test_importance_lies_inside_zero_and_one(self, scorer: Scorer) -> None:
        for values in (rows(1000) * 1e4, rows(1000) * 1e-4, torch.zeros(40, FEATURES)):
            importance, _ = scorer.score(values, None)
            assert importance.dtype == torch.float32
            assert ((importance > 0) & (importance < 1)).all()

    def test_a_state_can_be_used_twice(self, scorer: Scorer) -> None:
        _, state = scorer.score(rows(40), None)
        first, _ = scorer.score(rows(30, 1), state)
        second, _ = scorer.score(rows(30, 1), state)
        assert torch.equal(first, second)
        assert state.seen == 40

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_rows_are_scored_in_float32(self, scorer: Scorer, dtype: torch.dtype) -> None:
        values = rows(123).to(dtype)
        found, state = scorer.score(values, None)
        expected, _ = scorer.score(values.float(), None)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert state.recent.dtype == dtype

    def test_rows_of_another_width_are_refused(self, scorer: Scorer) -> None:
        _, state = scorer.score(rows(20), None)
        with pytest.raises(ModelError, match=r"\(3, 7\).*24"):
            scorer.score(torch.randn(3, 7), state)

    def test_no_tokens_change_nothing(self, scorer: Scorer) -> None:
        _, state = scorer.score(rows(20), None)
        importance, after = scorer.score(rows(0), state)
        assert importance.shape == (0,)
        assert torch.equal(after.recent, state.recent)

    def test_the_state_holds_a_window_and_no_more(self, scorer: Scorer) -> None:
        _, state = scorer.score(rows(1000), None)
        assert state.recent.shape[0] <= 16
        assert state.recent.untyped_storage().nbytes() <= 16 * FEATURES * 4
        assert state.nbytes >= state.recent.nbytes


def test_the_network_is_the_two_layers_written_out() -> None:
    scorer = scorers()[0]
    torch.manual_seed(3)
    network = Tlif(FEATURES)
    torch.nn.init.normal_(network.first.weight, std=0.3)
    torch.nn.init.normal_(network.second.weight, std=0.3)
    values = rows(50)
    inputs = network_inputs(values, values[:0], 16).double()
    hidden = inputs @ network.first.weight.double().T + network.first.bias.double()
    hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    expected = torch.sigmoid(hidden @ network.second.weight.double()[0] + network.second.bias.double())
    torch.testing.assert_close(scorer.score(values, None)[0].double(), expected, atol=2e-5, rtol=0)


def test_a_long_sequence_is_scored_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    values = rows(1000)
    expected = [scorer.score(values, None)[0] for scorer in scorers()]
    monkeypatch.setattr("hisparse.tlif.scorer._SLICE", 123)
    for scorer, importance in zip(scorers(), expected, strict=True):
        torch.testing.assert_close(scorer.score(values, None)[0], importance, atol=1e-5, rtol=0)


@given(st.integers(1, 7000))
def test_the_parameter_limit_holds_for_every_width(features: int) -> None:
    hidden = hidden_width(features)
    assert Tlif(features).parameters_learned < PARAMETER_LIMIT
    assert Tlif(features, hidden + 1).parameters_learned >= PARAMETER_LIMIT


def test_a_width_without_room_is_refused() -> None:
    with pytest.raises(ModelError, match=r"20000.*novelty"):
        hidden_width(20000)


@pytest.mark.parametrize("scorer", scorers(128)[1:], ids=lambda scorer: scorer.name)
def test_untrained_scores_average_a_tenth(scorer: Scorer) -> None:
    importance, _ = scorer.score(rows(20_000), None)
    assert abs(float(importance.mean()) - 0.1) < 0.01


def test_random_scores_depend_on_seed_and_position_alone() -> None:
    first, _ = RandomScorer(1).score(rows(500, 0), None)
    second, _ = RandomScorer(1).score(rows(500, 9), None)
    other, _ = RandomScorer(2).score(rows(500, 0), None)
    assert torch.equal(first, second)
    assert abs(float(torch.corrcoef(torch.stack((first, other)))[0, 1])) < 0.2


def test_novelty_finds_the_odd_row() -> None:
    values = rows(300) * 0.05 + torch.ones(FEATURES)
    values[200] = -values[200]
    importance, _ = NoveltyScorer(64).score(values, None)
    assert int(importance[64:].argmax()) + 64 == 200


def test_novelty_refuses_a_state_without_its_trail() -> None:
    _, state = RandomScorer().score(rows(5), None)
    with pytest.raises(ModelError, match="another scorer"):
        NoveltyScorer().score(rows(5), state)
