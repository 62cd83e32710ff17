"""`HiSparseCache`: a transformers Cache whose full-attention layers are HiSparse's."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from hisparse.cache.decode import batched
from hisparse.cache.geometry import Geometry
from hisparse.cache.layer import LayerStore
from hisparse.cache.planner import Planner
from hisparse.cache.pools import Pool
from hisparse.cache.report import CacheReport
from hisparse.cache.tables import Tables
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, UnsupportedError
from hisparse.identity import ModelIdentity
from hisparse.integrations.transformers.attention import HANDLE, NAME
from hisparse.integrations.transformers.shared import Shared, only
from hisparse.tlif import scorer_for
from hisparse.vtq.calibration import calibration_for
from hisparse.vtq.stats import ChannelStats, channel_order

STOPPED = "an earlier forward pass stopped half-way, so the layers of this cache hold different tokens; reset() it"


class HiSparseLayer(CacheLayerMixin):  # type: ignore[misc]
    """A full-attention layer of the cache. `update` returns only the new keys and values; see `attention`."""

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, shared: Shared, index: int, place: int, stats: ChannelStats | None, order: Tensor) -> None:
        super().__init__()
        self.shared, self.index, self.place, self.first = shared, index, place, place == 0
        self.stats, self.order = stats, order
        self.store: LayerStore | None = None
        self.waiting = False  # a chunk was handed out and has not come back through the attention function
        self.stored = 0  # chunks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        shared, device = self.shared, key_states.device
        if shared.geometry.batched and shared.tables is None:
            shared.tables = Tables(key_states.shape[0], device)
        self.store = LayerStore(
            shared.geometry, shared.page_ids, shared.row_ids, self.stats, self.order, device, shared.tables,
            self.place, shared.choice,
        )  # fmt: skip
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.waiting:
            raise UnsupportedError(
                f"layer {self.index}'s last chunk never reached the `{NAME}` attention function, so it was not stored; "
                "reset() the cache"
            )
        self.shared.check(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.index == 0:
            self.shared.values = value_states
        self.waiting = True
        key = key_states.view_as(key_states)  # a fresh view: the handle is not left on a tensor that others hold
        setattr(key, HANDLE, self)
        return key, value_states

    def attend_and_commit(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        """query [B, Hq, T, D]; key, value [B, H, T, D]; mask None or bool [B, N]. Returns [B, T, Hq, D]."""
        shared, store = self.shared, self.store
        assert store is not None
        batch = query.shape[0]
        if self.stored != shared.begun - (not self.first):
            raise UnsupportedError(STOPPED)
        if self.first:
            shared.begin(batch, query.shape[2], mask, query.device)
        if shared.step is not None and store.can_step(batch, shared.step):
            out = store.attend_step(query, key, value, shared.step, scaling)
        else:
            out = self._attend(store, query, key, value, scaling)
            for row, commit in enumerate(shared.commits):
                if commit is not None:
                    q, k, v = (only(x[row], shared.columns[row]) for x in (query, key, value))
                    store.commit(q, k, v, row, batch, shared.views[row].slots, commit)
        self.stored = shared.begun
        return out.transpose(1, 2).contiguous()

    def _attend(self, store: LayerStore, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[B, Hq, T, D]; padding columns come out as zeros."""
        shared = self.shared
        grouped = query.shape[1] != key.shape[1]
        if all(view.length == 0 for view in shared.views) and all(columns is None for columns in shared.columns):
            return scaled_dot_product_attention(
                query, key, value, is_causal=query.shape[2] > 1, scale=scaling, enable_gqa=grouped
            )
        rows = []
        for row, (view, columns) in enumerate(zip(shared.views, shared.columns, strict=True)):
            q, k, v = only(query[row], columns), only(key[row], columns), only(value[row], columns)
            if columns is None:
                rows.append(store.attend(q, k, v, row, view, scaling))
                continue
            full = torch.zeros_like(query[row])
            if len(columns):
                full[:, columns] = store.attend(q, k, v, row, view, scaling)
            rows.append(full)
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.shared.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen, padding included: positions follow it, whatever was set aside."""
        return self.shared.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.waiting = False
        self.stored = 0
        if self.store is not None:
            self.store = None
            self.is_initialized = False

    def offload(self) -> None:
        raise UnsupportedError("layer offloading; HiSparse moves set-aside rows to the host itself")

    def prefetch(self) -> None:
        raise UnsupportedError("layer prefetching; HiSparse moves set-aside rows to the host itself")


class _SlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A stock sliding-window layer that notices interrupted passes; the one at index 0 shows its values to the planner.

    early: the layer comes before the first HiSparse layer, which counts the columns of a chunk.
    """

    def __init__(self, shared: Shared, sliding_window: int, index: int, early: bool) -> None:
        super().__init__(sliding_window=sliding_window)
        self._shared, self._index, self._early = shared, index, early

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        shared = self._shared
        if self._index == 0:
            shared.check(key_states)
            shared.values = value_states
        if self.cumulative_length != shared.seen - (0 if self._early else key_states.shape[2]):
            raise UnsupportedError(STOPPED)
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def reset(self) -> None:
        # Before transformers 5.18 zeros of the old length stay, which `update` would put before the next sequence.
        self.keys = self.values = None
        self.is_initialized = False
        super().reset()


class HiSparseCache(Cache):  # type: ignore[misc]
    """KV cache in a ninth of the memory, for ``model.generate(..., past_key_values=cache)``.

    Parameters
    ----------
    model: a decoder with full or mixed full and sliding-window attention, set to the `hisparse` attention
        implementation (``model.set_attn_implementation("hisparse")``). Sliding-window layers keep their stock cache.
    config: default configuration if None.
    tlif, calibration: files made by `hisparse distill` and `hisparse calibrate`; the ones that ship with HiSparse are
        found by themselves. Without a TLIF an untrained scorer is used, without a calibration the statistics of the
        first packed tokens; both are announced by a warning.
    keep_plans: keep every block plan for pictures and inspection (off: only counts are kept).

    Raises
    ------
    UnsupportedError: the model is not on the `hisparse` attention implementation, or has layers HiSparse cannot hold.
    FormatError: a head size that pages or sketches cannot hold.
    ModelError: TLIF or calibration of another model. ConfigError: `hidden_size` differs from the weights'.

    One cache serves one batch of sequences, over any number of `generate` calls; `reset()` empties it. Beam search,
    assisted decoding, cropping and reordering raise UnsupportedError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: HiSparseConfig | None = None,
        tlif: Path | None = None,
        calibration: Path | None = None,
        keep_plans: bool = False,
    ) -> None:
        if config is not None and not isinstance(config, HiSparseConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; pass HiSparseConfig(...), or HiSparseConfig.load(path)"
            )
        self.config = (config or HiSparseConfig()).on(model.device.type)
        text = model.config.get_text_config(decoder=True)
        if text._attn_implementation != NAME:
            raise UnsupportedError(
                f'the model uses attention "{text._attn_implementation}"; '
                f'call model.set_attn_implementation("{NAME}") first'
            )
        self.config.check_hidden_size(text.hidden_size)
        if model.config.is_encoder_decoder:
            raise UnsupportedError(
                f"{model.config.model_type} is an encoder-decoder; HiSparse holds decoders' caches, use the stock cache"
            )
        kinds = _layer_kinds(text)
        identity = ModelIdentity.of(model)
        held = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
        geometry = Geometry(len(held), identity.kv_heads, identity.head_dim, model.dtype, self.config)
        self.geometry = replace(geometry, batched=batched(model.device, geometry))
        _ = (
            self.geometry.kept_format,
            self.geometry.row_format,
            self.geometry.aside_token_bytes,
        )  # raise where a head does not fit
        scorer = scorer_for(identity, self.config.tlif, tlif)
        if isinstance(scorer, torch.nn.Module):
            scorer.to(model.device)
        self.shared = Shared(self.geometry, scorer, keep_plans, text)
        order = channel_order(text)
        stats = (
            calibration_for(identity, calibration) if self.config.vtq.enable_per_block_quant or self._sketches else None
        )
        if stats is None and (self.config.vtq.enable_per_block_quant or self._sketches):
            warnings.warn(
                "no calibration for this model: channel statistics are estimated from the first tokens packed; "
                "`hisparse calibrate` makes a file that is more exact",
                stacklevel=2,
            )
        layers: list[CacheLayerMixin] = []
        for index, kind in enumerate(kinds):
            if kind == "full_attention":
                place = held.index(index)
                layers.append(HiSparseLayer(self.shared, index, place, stats[index] if stats else None, order))
            else:
                layers.append(_SlidingLayer(self.shared, text.sliding_window, index, index < held[0]))
        super().__init__(layers=layers)

    @property
    def _sketches(self) -> bool:
        return self.config.evict == "host"

    def reset(self) -> None:
        """Forget all sequences; the cache can be used for other ones."""
        super().reset()
        self.shared.clear()

    # Refused here and not layer by layer: no layer may have changed when the error is raised.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise UnsupportedError("beam search: packed sequences cannot be reordered; use num_beams=1 (sampling works)")

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedError(
            f"crop({tokens_to_remove}): packed tokens cannot be taken back (assisted decoding needs this too); "
            "start again with reset(), or copy.deepcopy the cache before the part that may be undone"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedError("repeating sequences inside the cache; repeat the inputs before the prefill instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise UnsupportedError("selecting sequences inside the cache; use one cache a sequence instead")

    def activate_past_recording(self) -> None:
        raise UnsupportedError(
            "assisted decoding takes tokens back, which packed tokens do not allow; "
            "generate without assistant_model and prompt_lookup_num_tokens"
        )

    @property
    def stores(self) -> list[LayerStore]:
        """The layers that hold something, in order."""
        return [layer.store for layer in self.layers if isinstance(layer, HiSparseLayer) and layer.store is not None]

    @property
    def planners(self) -> list[Planner]:
        """One a sequence."""
        return self.shared.planners

    def report(self) -> CacheReport:
        """Bytes, tokens and recall counts of everything HiSparse holds now."""
        stores, planners = self.stores, self.planners
        device: dict[str, int] = {}
        for store in stores:
            for name, size in store.device_bytes().items():
                device[name] = device.get(name, 0) + size
        tables = self.shared.tables
        device["tables"] = tables.nbytes if tables else sum(planner.sequence.table_bytes for planner in planners)
        device["scorer_state"] = sum(planner.state_bytes for planner in planners)
        sequences = [planner.sequence for planner in planners]
        total = sum(sequence.length for sequence in sequences)
        dense, kept, aside = (sum(len(s.positions()[i]) for s in sequences) for i in range(3))
        weights = self.shared.scorer.parameters() if isinstance(self.shared.scorer, torch.nn.Module) else []
        return CacheReport(
            dense_bytes=total * self.geometry.dense_token_bytes,
            gpu_bytes=sum(device.values()),
            host_bytes=sum(store.host_bytes() for store in stores),
            model_bytes=sum(w.nbytes for w in weights) + sum(store.stats.nbytes for store in stores if store.stats),
            device=device,
            tokens={
                "total": total,
                "dense": dense,
                "kept": kept,
                "set_aside": aside,
                "dropped": sum(s.dropped for s in sequences),
                "anchors": sum(planner.anchors for planner in planners),
            },
            blocks=sum(planner.blocks for planner in planners),
            recall=self._recall_counts(),
        )

    def _recall_counts(self) -> dict[str, int]:
        """What was recalled, in how many steps of one token and in how many longer chunks (of the layer with the most),
        and where hot buffers are in use, which of the rows that scans chose they held. Waits for the device."""
        recalled = [store.recalled for store in self.stores]
        counts = [store.decode.counts() for store in self.stores if store.decode is not None]
        row, repeated = self.geometry.row_format, sum(again for _, _, again in counts)
        found = {
            "steps": max((r.steps for r in recalled), default=0),
            "chunks": max((r.chunks for r in recalled), default=0),
            "rows": sum(r.rows for r in recalled) + repeated,
            "tokens": sum(r.tokens for r in recalled) + repeated * row.tokens,
            "bytes": sum(r.bytes for r in recalled) + repeated * row.page_bytes,
        }
        if self.geometry.hot:
            found |= {
                "hot_hits": sum(hits for hits, _, _ in counts),
                "hot_misses": sum(reads for _, reads, _ in counts),
            }
        return found

    def check_integrity(self) -> str:
        """Recount everything; returns the arithmetic in words. Raises AssertionError where it does not add up."""
        lines = [f"sequence {i}: {p.sequence.check()}" for i, p in enumerate(self.planners)]
        for name, ids, owned in (
            ("pages", self.shared.page_ids, [p.sequence.pages for p in self.planners]),
            ("rows", self.shared.row_ids, [p.sequence.rows for p in self.planners]),
        ):
            used = sum(len(o) for o in owned)
            lines.append(f"{name}: {used} owned = {ids.in_use} in use, {ids.capacity} allocated a layer")
            if used != ids.in_use or len({i for o in owned for i in o}) != used or ids.capacity < used:
                raise AssertionError(f"page accounting does not add up: {lines[-1]}")
        report = self.report()
        parts = " + ".join(f"{size} {name}" for name, size in report.device.items())
        lines.append(f"device: {parts} = {report.gpu_bytes} bytes")
        if self.shared.tables is not None:
            sequences = [planner.sequence for planner in self.planners]
            lines.append(self.shared.tables.check([s.pages for s in sequences], [s.rows for s in sequences]))
        for index, store in enumerate(self.stores):
            for name, pool, ids in (
                ("kept", store.kept, self.shared.page_ids),
                ("rows", store.rows, self.shared.row_ids),
            ):
                exact = isinstance(pool, Pool)  # pools on the host grow by segments
                if len(pool) < ids.capacity or (exact and len(pool) != ids.capacity):
                    raise AssertionError(f"layer {index}: {name} pool has {len(pool)} pages, ids {ids.capacity}")
            if store.decode is not None and store.decode.hot is not None:
                lines.append(f"layer {index}: {store.decode.hot.check()}")
        return "\n".join(lines)


def _layer_kinds(text: Any) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer. Raises UnsupportedError for any other kind."""
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedError(f"{text.model_type} caches latent vectors (MLA); HiSparse holds plain keys and values")
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
        kinds = ["full_attention" if window is None else "sliding_attention"] * text.num_hidden_layers
    other = sorted({kind for kind in kinds if kind not in ("full_attention", "sliding_attention")})
    if other:
        raise UnsupportedError(
            f"{text.model_type} has layers of kind {', '.join(other)}; HiSparse holds full attention"
        )
    if "full_attention" not in kinds:
        raise UnsupportedError(
            f"every layer of this {text.model_type} has a sliding window of {text.sliding_window} tokens: its cache "
            "does not grow with the context, so there is nothing to save; use the stock cache"
        )
    return list(kinds)
