"""TLIF, token-level importance filtering: which tokens matter, from layer 0's value rows alone."""

from hisparse.tlif.network import PARAMETER_LIMIT, Tlif, hidden_width
from hisparse.tlif.scorer import NoveltyScorer, RandomScorer, Scorer, ScorerState, TlifScorer
from hisparse.tlif.store import TlifCard, load_tlif, read_card, save_tlif, scorer_for, shipped_tlifs

__all__ = [
    "PARAMETER_LIMIT",
    "NoveltyScorer",
    "RandomScorer",
    "Scorer",
    "ScorerState",
    "Tlif",
    "TlifCard",
    "TlifScorer",
    "hidden_width",
    "load_tlif",
    "read_card",
    "save_tlif",
    "scorer_for",
    "shipped_tlifs",
]
