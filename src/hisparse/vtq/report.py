"""The quantisation error of every block of a real text, under each rule side by side.

A block here is what shares a step and a zero: one page's tokens x one KV head (x one channel group; groups of a head
are taken together, for attention sees a head as a whole). Its attention error is what happens to the output of the
query heads that read it when this block alone is packed, all else exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.config import VtqConfig
from hisparse.errors import InputError
from hisparse.ops.pack import pack_pages
from hisparse.ops.unpack import unpack_pages
from hisparse.ops.unpack.reference import read_scales
from hisparse.vtq.format import PageFormat
from hisparse.vtq.probe import LayerView, Probe, watching
from hisparse.vtq.stats import ChannelStats, channel_order, estimate_stats

SINKS = 4
TAIL = 128


@dataclass(frozen=True)
class Rule:
    """A way to spend bits: widths of K and V, and the split rule at five bits."""

    name: str
    k_bits: int
    v_bits: int
    split: str

    def format(self, config: VtqConfig, heads: int, head_dim: int) -> PageFormat:
        group = PageFormat.vtq(config, heads, head_dim, config.page_tokens()).group
        return PageFormat(config.page_tokens(), heads, head_dim, self.k_bits, self.v_bits, group)


RULES = (
    Rule("5 rope", 5, 5, "rope"),
    Rule("5 peaks", 5, 5, "peaks"),
    Rule("5 never", 5, 5, "never"),
    Rule("4", 4, 4, "never"),
    Rule("6", 6, 6, "never"),
)


@dataclass(frozen=True)
class BlockErrors:
    """Errors of one rule. k, v, attention: float32 [layers, pages, H]; output: float32 [layers], all blocks packed."""

    rule: Rule
    bits: float
    k: Tensor
    v: Tensor
    attention: Tensor
    output: Tensor
    split_share: float
    pack_seconds: float
    kl: float | None = None

    def summary(self) -> dict[str, Any]:
        """Plain numbers: means, 99th percentile and maximum of the block errors, and the share above 0.02."""
        flat = self.attention.flatten().sort().values
        return {
            "rule": self.rule.name,
            "bits": self.bits,
            "k_error": float(self.k.mean()),
            "v_error": float(self.v.mean()),
            "attention_error_mean": float(flat.mean()),
            "attention_error_p99": float(flat[int(0.99 * (len(flat) - 1))]),
            "attention_error_max": float(flat[-1]),
            "blocks_above_0.02": float((flat > 0.02).float().mean()),
            "output_error": float(self.output.mean()),
            "split_share": self.split_share,
            "pack_us_per_block": self.pack_seconds * 1e6 / (2 * self.k.numel()),
            "kl": self.kl,
        }


@dataclass(frozen=True)
class Report:
    """Errors by rule over the same blocks; `layers[i]` is the model's layer number of row i."""

    layers: list[int]
    tokens: int
    page_size: int
    calibrated: bool
    rules: list[BlockErrors]

    def worst(self, count: int, by: int = 0) -> list[dict[str, Any]]:
        """The `count` blocks with the largest attention error under rule number `by`, worst first."""
        reference = self.rules[by].attention
        order = reference.flatten().argsort(descending=True, stable=True)[:count]
        pages, heads = reference.shape[1:]
        rows = []
        for flat in order.tolist():
            layer, page, head = flat // (pages * heads), flat // heads % pages, flat % heads
            first = SINKS + page * self.page_size
            row: dict[str, Any] = {
                "layer": self.layers[layer],
                "head": head,
                "tokens": [first, first + self.page_size - 1],
            }
            row["k_error"] = float(self.rules[by].k[layer, page, head])
            row["v_error"] = float(self.rules[by].v[layer, page, head])
            row["attention_error"] = {e.rule.name: float(e.attention[layer, page, head]) for e in self.rules}
            rows.append(row)
        return rows

    def to_dict(self, worst: int) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "page_size": self.page_size,
            "calibrated": self.calibrated,
            "blocks": self.rules[0].k.numel(),
            "rules": [{**asdict(e.rule), **e.summary()} for e in self.rules],
            "worst": self.worst(worst),
        }


@torch.inference_mode()
def quantisation_report(
    model: Any,
    ids: Tensor,
    config: VtqConfig,
    stats: list[ChannelStats] | None,
    rules: Sequence[Rule] = RULES,
    queries: int = 16,
    kl: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Pack the keys and values of `ids` int64 [N] under each rule and compare.

    The first 4 tokens and the last 128 stay exact, as in the cache; `queries` queries are sampled from the last 128.
    With `kl`, the next-token distributions at the last 128 positions are compared as well (mean KL of packed from
    exact; every full-attention layer packed, the document itself read exactly), one forward a rule. `stats` None: each
    layer's own first 512 tokens are used, as the cache does without a calibration file. Raises InputError where N
    leaves no page.
    """
    pages = (len(ids) - SINKS - TAIL) // config.page_tokens()
    if pages < 1:
        raise InputError(
            f"the text has {len(ids)} tokens; with {SINKS} sinks and a tail of {TAIL} that leaves no page of "
            f"{config.page_tokens()}: give at least {SINKS + TAIL + config.page_tokens()}"
        )
    say = progress or (lambda _: None)
    start = len(ids) - TAIL
    device = model.get_input_embeddings().weight.device
    chunk = ids.to(device)[None]
    step = max(1, TAIL // min(queries, TAIL))
    probe = Probe(positions=torch.arange(start, len(ids), step, device=device)[:queries])
    say(f"Reading {len(ids)} tokens ...")
    with watching(model, probe):
        exact = model(input_ids=chunk, use_cache=False, logits_to_keep=TAIL).logits[0].float().log_softmax(-1)
    order = channel_order(model.config)
    layers = sorted(probe.layers)
    own = {i: stats[i].to(device) if stats else _first_chunk(probe.layers[i], order) for i in layers}
    results = []
    for rule in rules:
        say(f"Rule {rule.name} ...")
        measured = [_layer_errors(probe.layers[i], own[i], rule, config, pages) for i in layers]
        divergence = None
        if kl:
            divergence = _divergence(model, chunk, exact, own, rule, config, pages, start)
        columns = zip(*(m[0] for m in measured), strict=True)
        k, v, attention, output, split = (torch.stack(column).cpu() for column in columns)
        fmt = rule.format(config, k.shape[2], own[layers[0]].head_dim)
        seconds = sum(m[1] for m in measured)
        results.append(
            BlockErrors(rule, fmt.bits_per_value, k, v, attention, output, float(split.mean()), seconds, divergence)
        )
    return Report(layers, len(ids), config.page_tokens(), stats is not None, results)


def _first_chunk(view: LayerView, order: Tensor) -> ChannelStats:
    return estimate_stats(view.k[SINKS : SINKS + 512], view.v[SINKS : SINKS + 512], order)


def _packed(
    k: Tensor, v: Tensor, stats: ChannelStats, rule: Rule, config: VtqConfig, pages: int
) -> tuple[Tensor, Tensor, Tensor, float]:
    """k, v [n, P, H, D] of the pages after packing and unpacking, the bytes, and the seconds that packing took."""
    fmt = rule.format(config, k.shape[1], k.shape[2])
    here = slice(SINKS, SINKS + pages * config.page_tokens())
    shape = (pages, config.page_tokens(), k.shape[1], k.shape[2])
    k, v = k[here].reshape(shape).float(), v[here].reshape(shape).float()
    begin = time.perf_counter()
    packed = pack_pages(k, v, stats, fmt, rule.split, config.peak_separation_threshold)  # type: ignore[arg-type]
    seconds = time.perf_counter() - begin
    k, v = unpack_pages(packed, stats, fmt, torch.float32)
    return k, v, packed, seconds


def _layer_errors(
    view: LayerView, stats: ChannelStats, rule: Rule, config: VtqConfig, pages: int
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], float]:
    """(k, v, attention errors [n, H], output error [], share of split blocks []), seconds of packing."""
    new_k, new_v, packed, seconds = _packed(view.k, view.v, stats, rule, config, pages)
    n, tokens, heads, dim = new_k.shape
    here = slice(SINKS, SINKS + n * tokens)
    old_k, old_v = view.k[here].view_as(new_k), view.v[here].view_as(new_v)
    k_error, v_error = (
        (new - old).square().sum((1, 3)).sqrt() / (old - mean).square().sum((1, 3)).sqrt().clamp_min(1e-20)
        for new, old, mean in ((new_k, old_k, stats.k_mean), (new_v, old_v, stats.v_mean))
    )
    q = view.q.view(heads, -1, dim) * view.scaling  # [H, queries of its query heads, D]
    scores = torch.einsum("hqd,thd->hqt", q, view.k)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp()
    total, mass = torch.einsum("hqt,thd->hqd", weights, view.v), weights.sum(-1)
    old_w = weights[..., here].view(*weights.shape[:2], n, tokens)
    new_w = (torch.einsum("hqd,nphd->hqnp", q, new_k) - peak[..., None]).exp()
    old_part, new_part = (torch.einsum("hqnp,nphd->hqnd", w, v) for w, v in ((old_w, old_v), (new_w, new_v)))
    shift, gain = new_part - old_part, new_w.sum(-1) - old_w.sum(-1)  # [H, q, n, D], [H, q, n]
    out = total / mass[..., None]
    # (total + shift) / (mass + gain) - out, without the cancellation
    change = (shift - gain[..., None] * out[:, :, None]) / (mass[..., None] + gain)[..., None]
    scale = out.square().sum((1, 2)).sqrt()
    attention = (change.square().sum((1, 3)).sqrt() / scale[:, None]).T  # [n, H]
    whole = (shift.sum(2) - gain.sum(2, keepdim=True) * out) / (mass + gain.sum(2))[..., None]
    output = whole.norm() / out.norm()
    fmt = rule.format(config, heads, dim)
    splits = torch.stack([read_scales(packed, fmt, f)[2].float().mean() for f in (fmt.k, fmt.v)]).mean()
    return (k_error, v_error, attention, output, splits), seconds


def _divergence(
    model: Any,
    chunk: Tensor,
    exact: Tensor,
    stats: dict[int, ChannelStats],
    rule: Rule,
    config: VtqConfig,
    pages: int,
    start: int,
) -> float:
    """Mean KL (nats) of the next-token distribution at the tail with all pages packed from the exact one."""

    def change(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        new_k, new_v, _, _ = _packed(k, v, stats[layer], rule, config, pages)
        end = SINKS + pages * config.page_tokens()
        k = torch.cat([k[:SINKS].float(), new_k.reshape(-1, *k.shape[1:]), k[end:].float()])
        v = torch.cat([v[:SINKS].float(), new_v.reshape(-1, *v.shape[1:]), v[end:].float()])
        return k, v

    with watching(model, Probe(change=change, change_from=start)):
        logits = model(input_ids=chunk, use_cache=False, logits_to_keep=TAIL).logits[0].float().log_softmax(-1)
    return float((exact.exp() * (exact - logits)).sum(-1).mean())
