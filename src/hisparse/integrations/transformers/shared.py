"""What the layers of one cache have in common: planners, page ids, tables, and the chunk in progress."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from hisparse.cache.decode import SharedChoice
from hisparse.cache.geometry import Geometry
from hisparse.cache.planner import Planner
from hisparse.cache.pools import PageIds
from hisparse.cache.sequence import Commit, Sequence, View
from hisparse.cache.tables import Step, Tables
from hisparse.errors import FormatError, InputError, UnsupportedError
from hisparse.integrations.transformers.attention import NAME
from hisparse.tlif import Scorer


class _ConfigOf:
    """Weak reference to a model's configuration: a deep copy of the cache keeps it, a pickle leaves it behind."""

    def __init__(self, config: Any) -> None:
        self._reference = None if config is None else weakref.ref(config)

    def __call__(self) -> Any:
        return None if self._reference is None else self._reference()

    def __deepcopy__(self, memo: Any) -> _ConfigOf:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _ConfigOf, (None,)


class Shared:
    """What the layers of one cache have in common: planners, page ids, the chunk in progress."""

    def __init__(self, geometry: Geometry, scorer: Scorer, keep_plans: bool, model_config: Any) -> None:
        self.geometry, self.scorer, self.keep_plans = geometry, scorer, keep_plans
        self.model_config = _ConfigOf(model_config)
        self.clear()

    def clear(self) -> None:
        self.page_ids, self.row_ids = PageIds(), PageIds()
        self.planners: list[Planner] = []
        self.values: Tensor | None = None  # layer 0's value rows of the chunk in progress [B, H, T, D]
        self.columns: list[Tensor | None] = []  # per sequence: which columns of the chunk are tokens; None = all
        self.views: list[View] = []
        self.commits: list[Commit | None] = []
        self.tables: Tables | None = None  # where decode steps run for the whole batch at once
        self.step: Step | None = None  # the chunk in progress, where it is such a step
        self.choice = SharedChoice()  # rows that several layers recall
        self.steps = 0  # decode steps since the last longer chunk
        self.seen = 0  # columns seen so far, padding included
        self.begun = 0  # chunks

    def check(self, key: Tensor) -> None:
        """Raise where new keys [B, H, T, D] cannot join this cache, before any layer takes them in."""
        config, geometry = self.model_config(), self.geometry
        if config is not None and config._attn_implementation != NAME:
            raise UnsupportedError(
                f'the model now uses attention "{config._attn_implementation}", which cannot read this cache; call '
                f'model.set_attn_implementation("{NAME}")'
            )
        if self.planners and key.shape[0] != len(self.planners):
            raise InputError(
                f"a batch of {key.shape[0]} sequences, but this cache holds {len(self.planners)}; "
                "use a new cache or call reset()"
            )
        if (key.shape[1], key.shape[3]) != (geometry.heads, geometry.head_dim):
            raise UnsupportedError(
                f"a layer caches {key.shape[1]} heads of {key.shape[3]} channels where the configuration has "
                f"{geometry.heads} of {geometry.head_dim}; HiSparse holds plain keys and values, use the stock cache"
            )

    def begin(self, batch: int, chunk: int, mask: Tensor | None, device: torch.device) -> None:
        """Start a chunk: find its real tokens, and decide what every layer will do with it.

        Called by the first HiSparse layer of a forward pass. Nothing is changed where it raises.
        """
        if self.values is None:
            raise UnsupportedError(
                "layer 0 did not pass its values to the cache in this forward pass; HiSparse needs a decoder whose "
                "first layer caches keys and values"
            )
        columns, past = self._real_tokens(batch, chunk, mask)
        for row, (planner, visible) in enumerate(zip(self.planners, past, strict=False)):
            if visible != planner.sequence.length:
                raise InputError(
                    f"attention_mask shows {visible} cached tokens of sequence {row}, but the cache holds "
                    f"{planner.sequence.length}; pass the mask the cache was filled with, and new columns after it"
                )
        if not self.planners:
            self.planners = [self._planner() for _ in range(batch)]
        self.begun += 1
        single = chunk == 1 and all(real is None for real in columns)
        self.steps = self.steps + 1 if single else 0
        scan = not single or (self.steps - 1) % self.geometry.config.selection.scan_interval == 0
        self.columns = columns
        self.views = [planner.sequence.view(device, scan) for planner in self.planners]
        self.commits = self._decide(columns)
        self.step = None
        if self.tables is not None:
            whole = [commit for commit in self.commits if commit is not None]
            if single and any(view.length for view in self.views):
                targets = [planner.hot_rows for planner in self.planners]
                self.step = self.tables.step(self.geometry, self.views, whole, targets, scan)
            else:
                self.tables.extend(self.views, self.commits)
        self.values = None
        self.seen += chunk

    def _real_tokens(self, batch: int, chunk: int, mask: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
        """Which columns of a chunk are tokens (None: all), and how many of the cached columns are, by sequence.

        Waits for the device once, however large the batch.
        """
        if mask is None:
            return [None] * batch, [self.seen] * batch
        if mask.shape[1] != self.seen + chunk:
            raise InputError(
                f"attention_mask has {mask.shape[1]} columns, but {self.seen} tokens are cached and {chunk} are "
                f"new; pass all {self.seen + chunk}"
            )
        visible = mask.bool()
        real = visible[:, self.seen :]
        past, new = torch.stack([visible[:, : self.seen].sum(1), real.sum(1)]).tolist()
        columns = [None if count == chunk else real[row].nonzero().flatten() for row, count in enumerate(new)]
        return columns, past

    def _decide(self, columns: list[Tensor | None]) -> list[Commit | None]:
        """What every layer will do with the chunk, by sequence. Waits for the device once, for all importances.

        Raises FormatError where the last chunk held values that cannot be packed.
        """
        assert self.values is not None
        scores = []
        for planner, values, real in zip(self.planners, self.values, columns, strict=True):
            flat = only(values, real).transpose(0, 1).flatten(1)
            scores.append(planner.score(flat) if len(flat) else flat.new_empty(0, dtype=torch.float32))
        faults = [] if self.tables is None else [self.tables.faults.float()]
        found = torch.cat([*scores, *faults]).cpu()
        if faults and found[-1] > 0:
            raise FormatError(
                f"{int(found[-1])} blocks of keys or values packed before this chunk held inf, NaN or magnitudes that "
                "their format cannot hold; a float16 model may have overflowed: try bfloat16 or float32"
            )
        importance = torch.split(found, [*map(len, scores), *map(len, faults)])
        return [
            planner.extend(values.numpy()) if len(values) else None
            for planner, values in zip(self.planners, importance, strict=False)
        ]

    def _planner(self) -> Planner:
        config = self.geometry.config
        sequence = Sequence(
            self.page_ids,
            self.row_ids,
            config.vtq.page_tokens(),
            config.selection.row_size,
            config.tlif.prefix_length,
            config.evict,
        )
        return Planner(self.geometry, self.scorer, sequence, keep_plans=self.keep_plans)


def only(x: Tensor, columns: Tensor | None) -> Tensor:
    """The given columns of [heads, T, D]; all of them for None."""
    return x if columns is None else x[:, columns]
