"""Bins that rows are counted by before the best are chosen: 2**-8 of an octave of worth each.

Where worth is what `scan_rows` returns, a sum of roots of shares over `heads` query heads, its squares sum to no more
than ``heads ** 2`` (Cauchy and Schwarz), and so no more than `budget` rows reach ``heads / sqrt(budget)``. All rows
from there on share the top bin; eight octaves below, the bottom bin takes the rest. Other worth is chosen as exactly,
if more slowly: bins are only a first sieve.
"""

from __future__ import annotations

import math
import struct

BINS = 2048
SHIFT = 15
"""Of the 31 bits of a worth, the exponent and the first eight of the mantissa remain."""


def lowest_bin(heads: float, budget: int) -> int:
    """First digits of the bottom bin's upper neighbours: BINS below those of the limit."""
    (bits,) = struct.unpack("<i", struct.pack("<f", heads / math.sqrt(budget)))
    return max(int(bits >> SHIFT) - (BINS - 1), 0)
