"""Attention of one new token a sequence over everything a layer holds, for a batch of sequences of different
lengths."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hisparse.errors import FormatError
from hisparse.ops._dispatch import select_backend
from hisparse.ops.decode.types import DecodeResult, Early, Pages
from hisparse.ops.pack import check_stats
from hisparse.vtq.stats import ChannelStats

__all__ = ["DecodeResult", "Early", "Pages", "decode_attention", "reserve"]

Split = Literal["rope", "peaks", "never"]


def reserve(q: Tensor, dense_k: Tensor, buffers: int = 1) -> Early | None:
    """Memory for `decode_attention` with `early`; q and dense_k as there. None where no kernel starts early.

    buffers: hot buffers that the rows of the batch are fetched through, one for all or one a sequence; 0 for rows on
    the device.
    Call it before the scan whose rows are attended to, and hold the result until the attention is launched.
    """
    backend = select_backend("decode", q.device)
    early: Early | None = backend.reserve(q, dense_k, buffers) if hasattr(backend, "reserve") else None
    return early


def decode_attention(
    q: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    dense_len: Tensor,
    kept: Pages | None = None,
    recalled: Pages | None = None,
    stats: ChannelStats | None = None,
    scaling: float = 1.0,
    *,
    extra_logit: Tensor | None = None,
    extra_value: Tensor | None = None,
    page_mass: bool = False,
    split: Split | None = None,
    early: Early | None = None,
    out: Tensor | None = None,
) -> DecodeResult:
    """One softmax over dense slots, kept pages, recalled rows and extra tokens.

    q: [B, Hq, D] post-RoPE, float16, bfloat16 or float32 (the reference also float64), Hq a multiple of H. dense_k,
    dense_v: [B, H, S, D] in q's dtype, of which each sequence has the first dense_len int32 [B]; what lies beyond is
    not read. kept, recalled: pages of the same heads; their tokens are normalised by `stats` (None only without
    quantised pages). scaling: factor of the scores. extra_logit float32 [B, Hq, E] and extra_value [B, H, E, D]: tokens
    whose scores are given, scaling included (-inf: not there). page_mass: also return each page's log-sum-exp. split:
    how the pages were packed, where that is known ("rope": five-bit K is always split in six and four bits, V never;
    "never"); None and "peaks" read it from every page, which costs some time. The wrong one reads wrong values.

    early: what `reserve` gave before the scan of this step (`hisparse.ops.scan.scan_and_select`, on the same stream)
    was launched: attention to dense slots and kept pages may then begin while the scan still runs. All that is given
    except `recalled` must have been written before that scan was launched, and not be written to since.

    out: [B, Hq, D] in q's dtype, contiguous, where the result is to be written; it is also in the result.

    Flash-decoding (Dao et al. 2023): the sequence is cut into shares, whose results are combined by their log-sum-exp.
    On a GPU nothing is synchronised and every shape follows from the arguments' shapes, so that calls can be captured
    in a CUDA graph: lengths, tables and pools may change between replays. A sequence without any token gets out = 0,
    lse = -inf.

    Raises FormatError for shapes, dtypes or statistics that do not fit together.
    """
    _check(q, dense_k, dense_v, dense_len, kept, recalled, stats, extra_logit, extra_value)
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous()):
        raise FormatError(
            f"decode_attention: out is {out.dtype} {list(out.shape)} with strides {out.stride()}; give {q.dtype} "
            f"{list(q.shape)}, contiguous"
        )
    backend = select_backend("decode", q.device)
    result: DecodeResult = backend.decode_attention(
        q, dense_k, dense_v, dense_len, kept, recalled, stats, scaling, extra_logit, extra_value, page_mass, split,
        out=out, **({} if early is None else {"early": early}),
    )  # fmt: skip
    return result


def _check(
    q: Tensor,
    dense_k: Tensor,
    dense_v: Tensor,
    dense_len: Tensor,
    kept: Pages | None,
    recalled: Pages | None,
    stats: ChannelStats | None,
    extra_logit: Tensor | None,
    extra_value: Tensor | None,
) -> None:
    if q.dim() != 3 or dense_k.dim() != 4 or dense_k.shape != dense_v.shape:
        raise FormatError(
            f"decode_attention: q {list(q.shape)}, dense_k {list(dense_k.shape)}, dense_v {list(dense_v.shape)}; "
            "give [B, Hq, D] and twice [B, H, S, D]"
        )
    batch, q_heads, dim = q.shape
    heads = dense_k.shape[1]
    if dense_k.shape[0] != batch or dense_k.shape[3] != dim or heads == 0 or q_heads % heads:
        raise FormatError(
            f"decode_attention: q {list(q.shape)} and dense_k {list(dense_k.shape)} differ in batch or head_dim, or "
            f"{q_heads} query heads are no multiple of {heads} KV heads"
        )
    if dense_k.dtype != q.dtype or dense_v.dtype != q.dtype:
        raise FormatError(f"decode_attention: q is {q.dtype}, dense K and V {dense_k.dtype}, {dense_v.dtype}; give one")
    lengths: list[tuple[str, Tensor, tuple[int, ...]]] = [("dense_len", dense_len, (batch,))]
    for name, pages in (("kept", kept), ("recalled", recalled)):
        if pages is None:
            continue
        fmt = pages.fmt
        if pages.pool.dtype != torch.uint8 or pages.pool.dim() != 2 or pages.pool.shape[1] != fmt.page_bytes:
            raise FormatError(
                f"decode_attention: {name}.pool is {pages.pool.dtype} {list(pages.pool.shape)}; "
                f"its format has uint8 [n, {fmt.page_bytes}]"
            )
        if pages.pool.shape[0] and (
            pages.pool.stride(1) != 1 or pages.pool.stride(0) % 16 or pages.pool.data_ptr() % 16
        ):
            raise FormatError(
                f"decode_attention: {name}.pool has strides {pages.pool.stride()} and starts at byte "
                f"{pages.pool.data_ptr() % 16} of 16; pages must be whole rows that start at multiples of 16 bytes"
            )
        if (fmt.heads, fmt.head_dim) != (heads, dim):
            raise FormatError(
                f"decode_attention: {name} pages are of {fmt.heads} heads x {fmt.head_dim}, "
                f"but dense K of {heads} x {dim}"
            )
        if pages.table.dim() != 2:
            raise FormatError(f"decode_attention: {name}.table is {list(pages.table.shape)}; give [B, max_pages]")
        lengths += [(f"{name}.table", pages.table, (batch, pages.table.shape[1]))]
        lengths += [(f"{name}.count", pages.count, (batch,))]
        check_stats(stats, fmt, "decode_attention")
    for name, x, shape in lengths:
        if x.dtype != torch.int32 or tuple(x.shape) != shape:
            raise FormatError(f"decode_attention: {name} is {x.dtype} {list(x.shape)}; give int32 {list(shape)}")
    if (extra_logit is None) != (extra_value is None):
        raise FormatError("decode_attention: extra_logit and extra_value go together; give both or none")
    if extra_logit is not None and extra_value is not None:
        extra = extra_logit.shape[-1]
        shapes = tuple(extra_logit.shape), tuple(extra_value.shape)
        if shapes != ((batch, q_heads, extra), (batch, heads, extra, dim)):
            raise FormatError(
                f"decode_attention: extra_logit {list(extra_logit.shape)}, extra_value {list(extra_value.shape)}; "
                f"give [{batch}, {q_heads}, E] and [{batch}, {heads}, E, {dim}]"
            )
