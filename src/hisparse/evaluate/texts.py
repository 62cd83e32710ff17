"""Held-out text cut into sentences (hay for needles) and into windows of tokens (for fidelity and speed)."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import InputError

# A sentence ends at its mark, with the quotation marks or brackets that close after it.
_END = re.compile(r"""(?<=[.!?])(?:["'”’)\]]*)\s+""")
_SHORTEST = 20  # characters; headings, numbers and names of speakers are no hay


def sentences(text: str) -> list[str]:
    """The sentences of `text` in order, each on one line with single spaces; scraps under 20 characters are left out.

    A paragraph (empty line) always ends a sentence. Raises InputError where nothing is left.
    """
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        start = 0
        for match in _END.finditer(line):
            found.append(line[start : match.end()].strip())
            start = match.end()
        found.append(line[start:].strip())
    kept = [sentence for sentence in found if len(sentence) >= _SHORTEST]
    if not kept:
        raise InputError(f"a text of {len(text)} characters without a sentence; give a text of running prose")
    return kept


def windows(tokenizer: Any, text: str, tokens: int, count: int) -> list[Tensor]:
    """`count` windows of exactly `tokens` token ids, int64 [1, tokens] each, evenly spread over `text`.

    Windows overlap only where the text is too short for them side by side. Raises InputError where the text holds fewer
    than `tokens` tokens.
    """
    if tokens < 1 or count < 1:
        raise InputError(f"{count} windows of {tokens} tokens: both must be at least 1")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int64)
    spare = len(ids) - tokens
    if spare < 0:
        raise InputError(f"the text has {len(ids)} tokens, a window needs {tokens}; give a longer text or ask for less")
    starts = [spare * i // max(count - 1, 1) for i in range(count)]
    start_id = tokenizer.bos_token_id if _adds_bos(tokenizer) else None
    cut = [ids[start : start + tokens].clone() for start in starts]
    if start_id is not None:
        for window in cut:
            window[0] = start_id
    return [window[None] for window in cut]


def _adds_bos(tokenizer: Any) -> bool:
    """Whether this tokenizer begins every text with a bos token, which models trained so cannot do without."""
    first = tokenizer("a").input_ids[:1]
    return bool(first) and tokenizer.bos_token_id is not None and first[0] == tokenizer.bos_token_id
