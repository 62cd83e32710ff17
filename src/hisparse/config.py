"""The configuration: frozen, validated at construction, read from `hi-sparse-config.json` (all keys optional).

Defaults are written here and nowhere else. An unknown key, a wrong type or an impossible combination raises
:class:`~hisparse.errors.ConfigError` naming the key, the value and what would be right.
"""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hisparse.errors import ConfigError

BITS = Literal[4, 5, 6]
CPU_PAGE, GPU_PAGE = 4, 16
"""Tokens a page where the configuration does not say."""
_DOCUMENTED = '"Your own configuration" in README.md'
_NAMED = 3
"""Mistakes of a kind that are told of at most."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TlifConfig(_Section):
    """Token importance: the threshold law and the window of the statistics."""

    threshold_base: float = Field(0.32, gt=0, lt=1)
    threshold_scale_factor: float = Field(1.28, gt=0)
    threshold_exponent: float | None = None
    prefix_length: int = Field(128, ge=1, le=65536)
    scorer: Literal["tlif", "novelty", "random"] = "tlif"

    def threshold(self, context: int) -> float:
        """Importance from which a token is an anchor, at a context of `context` tokens.

        ``threshold_base * threshold_scale_factor ** log8(context / 131072)``; with `threshold_exponent` set,
        ``threshold_base * (context / 131072) ** threshold_exponent``. Clipped to below 1.
        """
        ratio = max(context, 1) / 131072
        base, power = self.threshold_scale_factor, math.log(ratio, 8)
        if self.threshold_exponent is not None:
            base, power = ratio, self.threshold_exponent
        try:
            value = float(self.threshold_base * base**power)
        except OverflowError:
            value = 1.0
        return min(value, 1 - 1e-6)


class BlgsConfig(_Section):
    """Blocks: sizes in tokens (and channels), and how much density is traded for bytes."""

    max_block_size: int = Field(256, ge=1, le=65536)
    min_block_size: int = Field(8, ge=1, le=65536)
    bandwidth_weight: float = Field(0.72, ge=0, le=1)

    @model_validator(mode="after")
    def _sizes(self) -> BlgsConfig:
        for name in ("min_block_size", "max_block_size"):
            size = getattr(self, name)
            if size & (size - 1):
                raise ValueError(f"{name} = {size} is not a power of two; use 8, 16, 32, ... 256")
        if self.min_block_size > self.max_block_size:
            raise ValueError(
                f"min_block_size = {self.min_block_size} is larger than max_block_size = {self.max_block_size}; "
                "lower the first or raise the second"
            )
        return self


class VtqConfig(_Section):
    """Quantisation: bits a value of K, and of V where it differs, and how a block is split in 6 and 4 bits.

    page_size: tokens a page; None: what suits the device (see `page_tokens`).
    """

    enable_per_block_quant: bool = True
    default_bit_width: BITS = 5
    value_bit_width: BITS | None = None
    split: Literal["rope", "peaks", "never"] = "rope"
    peak_separation_threshold: float = Field(0.15, gt=0, lt=1)
    page_size: int | None = Field(None, ge=1, le=256)
    channel_group: int = Field(64, ge=8)

    @property
    def v_bits(self) -> int:
        return self.default_bit_width if self.value_bit_width is None else self.value_bit_width

    def page_tokens(self, device: str = "cpu") -> int:
        """Tokens a page on a kind of device ("cpu", "cuda").

        A GPU reads large pages faster, but a page's tokens share their steps and wait in dense slots until it is full.
        """
        return (GPU_PAGE if device == "cuda" else CPU_PAGE) if self.page_size is None else self.page_size


class SelectionConfig(_Section):
    """Recall: the sketch a token leaves behind, how many tokens a step may read back, and how.

    scan_interval: sketches are scanned every so many steps; in between the rows of the last scans serve. hot_factor:
    how many times the rows of one step a GPU keeps of those recalled lately, where the byte target leaves room (0:
    none). share_layers: so many layers in a row recall the same rows in a decode step, which the first of them chooses.
    """

    sketch_bits: Literal[1, 2] = 2
    row_size: int = Field(4, ge=1, le=64)
    min_tokens: int = Field(512, ge=1)
    root_factor: float = Field(12.0, ge=0)
    rows: Literal["host", "device"] = "host"
    scan_interval: int = Field(1, ge=1)
    hot_factor: float = Field(2.0, ge=0, le=64)
    share_layers: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _hot(self) -> SelectionConfig:
        if 0 < self.hot_factor < 1:
            raise ValueError(
                f"hot_factor = {self.hot_factor}: the hot buffer must hold what one step recalls; use 1 or more, or 0 "
                "for no buffer"
            )
        return self

    def budget(self, context: int) -> int:
        """Tokens a layer may recall in one step at a context of `context` tokens.

        ``max(min_tokens, root_factor * sqrt(context))``: what a query needs grows with the context, but more slowly.
        """
        return max(self.min_tokens, math.ceil(min(self.root_factor * math.sqrt(context), context)))


class PrefillConfig(_Section):
    """How a chunk of a prompt attends to what is already stored; `chunk`: the command line prefills in such pieces.

    A chunk of at most `recall_max_tokens` recalls; with mode "recall" a longer one too. choose: its rows are chosen
    once for the whole chunk, or for each token.
    """

    mode: Literal["full", "recall"] = "full"
    recall_max_tokens: int = Field(256, ge=1)
    choose: Literal["chunk", "token"] = "chunk"
    chunk: int | None = Field(None, ge=1)


class BudgetConfig(_Section):
    """Byte target: `capacity` = dense bf16 bytes / device bytes. None leaves the threshold alone."""

    capacity: float | None = Field(9.0, ge=0.1, le=1000)
    min_keep: float = Field(0.01, ge=0, le=1)
    max_keep: float = Field(0.37, ge=0, le=1)

    @model_validator(mode="after")
    def _order(self) -> BudgetConfig:
        if self.min_keep > self.max_keep:
            raise ValueError(f"min_keep = {self.min_keep} is larger than max_keep = {self.max_keep}; swap them")
        return self


class LifecycleConfig(_Section):
    """Reclaiming idle blocks. Read and checked, but without effect until blocks are reclaimed."""

    idle_tokens: int = Field(10, ge=1)
    reserve_fraction: float = Field(0.05, ge=0, lt=1)


class HiSparseConfig(_Section):
    """Everything that shapes the cache. `HiSparseConfig()` is the default configuration."""

    tlif: TlifConfig = TlifConfig()
    blgs: BlgsConfig = BlgsConfig()
    vtq: VtqConfig = VtqConfig()
    selection: SelectionConfig = SelectionConfig()
    prefill: PrefillConfig = PrefillConfig()
    budget: BudgetConfig = BudgetConfig()
    lifecycle: LifecycleConfig = LifecycleConfig()
    evict: Literal["host", "drop", "none"] = "host"
    hidden_size: int | None = Field(None, ge=1)

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_explain(error, type(self))) from None

    @model_validator(mode="after")
    def _combination(self) -> HiSparseConfig:
        if self.evict == "drop" and self.prefill.mode == "recall":
            raise ValueError(
                'evict = "drop" leaves nothing to recall, but prefill.mode = "recall"; '
                'use evict = "host" or prefill.mode = "full"'
            )
        return self

    def on(self, device: str) -> HiSparseConfig:
        """The same with nothing left to a kind of device ("cpu", "cuda")."""
        vtq = self.vtq.model_copy(update={"page_size": self.vtq.page_tokens(device)})
        return self.model_copy(update={"vtq": vtq})

    def check_hidden_size(self, width: int) -> None:
        """Raise ConfigError where this is the configuration of a model whose hidden states have not `width` values."""
        if self.hidden_size not in (None, width):
            raise ConfigError(
                f"hidden_size = {self.hidden_size}, but the model's weights have {width}; correct the configuration or "
                "choose the other model"
            )

    @classmethod
    def load(cls, path: str | Path) -> HiSparseConfig:
        """Read a JSON file. Raises ConfigError for a missing file, broken JSON, or a bad key or value."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config {path}: cannot be read ({error}); give the path of a JSON file") from None
        try:
            data = json.loads(text, object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"config {path}: not JSON at line {error.lineno}, column {error.colno} ({error.msg})"
            ) from None
        except RecursionError:
            raise ConfigError(f"config {path}: nested too deeply; give an object of sections of keys") from None
        except ConfigError as error:
            raise ConfigError(f"config {path}: {error}") from None
        except ValueError as error:  # a whole number of thousands of digits
            raise ConfigError(f"config {path}: {error}; give values that a 64-bit number can hold") from None
        if not isinstance(data, dict):
            raise ConfigError(f"config {path}: holds a {type(data).__name__}; the top level must be an object {{...}}")
        try:
            return cls(**data)
        except ConfigError as error:
            raise ConfigError(f"config {path}: {error}") from None

    def dump(self) -> str:
        """JSON text that :meth:`load` reads back to an equal config."""
        return self.model_dump_json(indent=2)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:  # JSON would silently take the last
            raise ConfigError(f'key "{key}" is given twice; give it once')
        data[key] = value
    return data


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key with its section: "vtq", "vtq.page_size", ..."""
    found = []
    for name, entry in model.model_fields.items():
        found.append(prefix + name)
        if isinstance(entry.annotation, type) and issubclass(entry.annotation, BaseModel):
            found += _keys(entry.annotation, f"{prefix}{name}.")
    return found


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _nearest(path: tuple[str, ...], known: list[str]) -> str | None:
    """The known key that the last part of `path` most likely means: one of another section only where it is spelt so
    or almost so."""
    section = "".join(f"{part}." for part in path[:-1])
    here = [key for key in known if key.startswith(section) and "." not in key[len(section) :]]
    for keys, cutoff in ((known, 1.0), (here, 0.6), (known, 0.8)):
        names = {key.rpartition(".")[2]: key for key in reversed(keys)}
        if close := difflib.get_close_matches(path[-1], list(names), n=1, cutoff=cutoff):
            return names[close[0]]
    return None


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One short sentence a problem, for at most `_NAMED` unknown keys and as many others."""
    unknown: list[str] = []
    others: list[str] = []
    known = _keys(model)
    for item in error.errors():
        path = tuple(str(part) for part in item["loc"])
        key, value = _short(".".join(path)), _short(repr(item["input"]))
        if item["type"] == "extra_forbidden":
            close = _nearest(path, known) if len(unknown) < _NAMED else None
            unknown.append(f'"{key}" = {value}' + (f' (did you mean "{close}"?)' if close else ""))
        elif item["type"] == "value_error":
            others.append(f"{key}: {item['ctx']['error']}" if path else str(item["ctx"]["error"]))
        elif item["type"] in ("model_type", "dict_type"):
            others.append(f"{key} = {value}: must be an object {{...}} of keys")
        else:
            others.append(f"{key} = {value}: {item['msg'][:1].lower()}{item['msg'][1:]}")
    parts = []
    if unknown:
        parts.append(f"unknown key{'s' * (len(unknown) > 1)} {_few(unknown, ', ')}; see {_DOCUMENTED}")
    return "; ".join([*parts, *([_few(others, "; ")] if others else [])])


def _few(parts: list[str], between: str) -> str:
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return between.join(parts[:_NAMED]) + more
