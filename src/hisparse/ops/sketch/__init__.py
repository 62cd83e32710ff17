"""Sketches: the few bits of a key that stay on the device when its token is set aside, and the scores read from them.

A key is written in the layer's sketch basis (see :mod:`hisparse.vtq.basis`), whose first coordinates matter most to the
scores. With b bits a channel on average (1 or 2), the first ``D * b / 8`` coordinates get four bits, the next ``D * b /
4`` get two, and the rest none. Each is divided by the token's own root mean square and rounded to uniform levels
``(code - (levels - 1) / 2) * STEP``; one more byte holds that root mean square as ``round(16 * log2(rms)) + 128``.

Layout: codes uint8 [rows, H, R, D * b / 8], scales uint8 [rows, H, R]. A token's bytes of one head come in ``P = D * b
/ 16`` pairs. Pair i holds, in its first byte, the four-bit codes of coordinates i (low) and ``P + i`` (high), and in
its second, at bit ``2 * s``, the two-bit code of coordinate ``(2 + s) * P + i``. So every 32-bit word holds twelve
codes at the same places, and any cut into words is fit for the matrix units.
"""

from __future__ import annotations

from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.vtq.stats import ChannelStats

# Step of the uniform quantiser with the least squared error for a standard normal, by number of bits (Max, 1960).
STEP = {2: 0.9957, 4: 0.3352}


def sketch_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one token's sketch in one KV head, its scale included. Raises FormatError as :func:`coordinates`."""
    coordinates(head_dim, bits)
    return head_dim * bits // 8 + 1


def coordinates(head_dim: int, bits: int) -> tuple[int, int]:
    """How many coordinates get four bits, and how many get two. Raises FormatError where they do not fill bytes."""
    if head_dim * bits % 16:
        other = "selection.sketch_bits = 2, " if head_dim % 8 == 0 else ""
        raise FormatError(
            f"head_dim {head_dim} with selection.sketch_bits = {bits}: a sketch of 1 bit a channel needs a multiple of "
            f'16 channels, of 2 bits a multiple of 8; use {other}evict = "none" or evict = "drop", which need no '
            "sketches"
        )
    return head_dim * bits // 8, head_dim * bits // 4


def build_sketch(keys: Tensor, stats: ChannelStats, bits: int) -> tuple[Tensor, Tensor]:
    """Sketch keys.

    keys: [n, R, H, D], post-RoPE, any float dtype. bits: 1 or 2.
    Returns codes uint8 [n, H, R, D * bits / 8] and scales uint8 [n, H, R]. Raises FormatError as :func:`coordinates`.
    """
    return select_backend("sketch", keys.device).build_sketch(keys, stats, bits)  # type: ignore[no-any-return]


def sketch_tokens(
    keys: Tensor, tokens: Tensor, stats: ChannelStats, bits: int, codes: Tensor, scales: Tensor, places: Tensor
) -> None:
    """Sketch keys that lie anywhere to rows that lie anywhere.

    keys: [N, H, D]; tokens: int64 [n, R], which of them are a row's; codes: uint8 [lines, H * R * D * bits / 8],
    scales: uint8 [lines, H * R], lines any distance apart; places: int64 [n], each line at most once. Bytes as those of
    :func:`build_sketch`. Raises FormatError as :func:`coordinates`, and for shapes that do not fit.
    """
    heads, dim = stats.heads, stats.head_dim
    each = tokens.shape[-1] * heads
    wanted = ((heads, dim), (each * (sketch_bytes(dim, bits) - 1),), (each,), (len(tokens),))
    found = (keys.shape[1:], codes.shape[1:], scales.shape[1:], places.shape)
    if tokens.dim() != 2 or wanted != tuple(map(tuple, found)):
        raise FormatError(
            f"sketch_tokens: keys, codes, scales and places end in {[list(shape) for shape in found]} for tokens "
            f"{list(tokens.shape)}; give {[list(shape) for shape in wanted]}"
        )
    if len(tokens):
        select_backend("sketch", keys.device).sketch_tokens(keys, tokens, stats, bits, codes, scales, places)


def score_sketch(queries: Tensor, codes: Tensor, scales: Tensor, stats: ChannelStats, scaling: float) -> Tensor:
    """Estimated attention scores of sketched tokens.

    queries: [Hq, T, D] post-RoPE. codes, scales: n rows of `build_sketch`, of R tokens each.
    Returns float32 [Hq, T, n * R], estimates of ``scaling * <q, k>``.
    """
    return select_backend("sketch", queries.device).score_sketch(queries, codes, scales, stats, scaling)  # type: ignore[no-any-return]
