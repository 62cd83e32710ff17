"""Calibration: the channel statistics of a model, measured once on text and kept in a safetensors file.

The mean of a slowly rotating key channel depends on the positions it is measured at, so windows of text are run at
positions spread over the model's whole range (attention is relative: the text is read the same wherever it stands). The
first tokens of a window are left out: they are sinks, whose values are unlike all others and which stay dense anyway.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from hisparse.errors import FormatError, InputError, ModelError
from hisparse.vtq.basis import sketch_basis
from hisparse.vtq.stats import ChannelStats, channel_order, floor_scales, group_queries

if TYPE_CHECKING:
    from hisparse.identity import ModelIdentity

FILE_VERSION = "2"
SUFFIX = ".calibration.safetensors"
SINKS = 4
MAX_SPAN = 32768
_FIELDS = ("k_mean", "k_scale", "v_mean", "v_scale")
_RECORDER = "hisparse_calibration"


@dataclass
class _SecondMoments:
    """Sums of outer products of keys and of queries of one layer, float64 [H, D, D]."""

    tokens: int = 0
    queries: int = 0
    of_keys: Tensor | None = None
    of_queries: Tensor | None = None

    def add(self, q: Tensor, k: Tensor) -> None:
        """q [Hq, T, D], k [H, T, D], without the sinks."""
        k, q = k.double(), group_queries(q.double(), k.shape[0])
        keys, queries = k.mT @ k, q.mT @ q
        self.of_keys = keys if self.of_keys is None else self.of_keys + keys
        self.of_queries = queries if self.of_queries is None else self.of_queries + queries
        self.tokens, self.queries = self.tokens + k.shape[1], self.queries + q.shape[1]

    def basis(self, k_mean: Tensor) -> Tensor | None:
        """The sketch basis; None where the layer's attention was never seen."""
        if self.of_keys is None or self.of_queries is None:
            return None
        mean = k_mean.double()
        covariance = self.of_keys / self.tokens - mean[:, :, None] * mean[:, None, :]
        # Rounded as the file will hold it: the queries' basis is the inverse of what is stored.
        return sketch_basis(covariance, self.of_queries / self.queries).half().float()


class _Recorder:
    """Records queries and keys on their way into attention, under an attention name of its own."""

    def __init__(self) -> None:
        self.layers: dict[int, _SecondMoments] = {}

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        moments = self.layers.setdefault(module.layer_idx, _SecondMoments())
        moments.add(query[0, :, SINKS:], key[0, :, SINKS:])
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    @contextmanager
    def installed(self, model: Any) -> Iterator[None]:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        before = model.config._attn_implementation
        AttentionInterface.register(_RECORDER, self.attention)
        AttentionMaskInterface.register(_RECORDER, sdpa_mask)
        model.set_attn_implementation(_RECORDER)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


@dataclass
class _Moments:
    """Running count, mean and sum of squared deviations of [T, H, D] rows, float64 (Chan, Golub and LeVeque 1983)."""

    count: int = 0
    mean: Tensor | None = None
    squares: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        rows = rows.double()
        count, mean = len(rows), rows.mean(0)
        squares = (rows - mean).square().sum(0)
        if self.mean is None or self.squares is None:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total, shift = self.count + count, mean - self.mean
        self.squares = self.squares + squares + shift.square() * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    def result(self) -> tuple[Tensor, Tensor]:
        """Mean and scale, float32 [H, D]."""
        assert self.mean is not None  # one window has been added
        assert self.squares is not None
        return self.mean.float(), floor_scales((self.squares / self.count).sqrt().float())


def spread(room: int, count: int) -> list[int]:
    """`count` whole numbers spread evenly over 0 .. room; the middle for one."""
    return [room // 2] if count == 1 else [round(i * room / (count - 1)) for i in range(count)]


def sample_windows(tokenizer: Any, texts: Sequence[str], windows: int, length: int) -> list[Tensor]:
    """`windows` pieces of `length` tokens, int64 [length], spread evenly over each text; texts get equal shares.

    Only the pieces are tokenised, so a text may be large. Raises InputError where there are more texts than windows, or
    a text has too few tokens.
    """
    if not 1 <= len(texts) <= windows:
        raise InputError(f"{len(texts)} texts for {windows} windows; give at least one text, and a window for each")
    pieces = []
    for i, text in enumerate(texts):
        share = windows // len(texts) + (i < windows % len(texts))
        width = 8 * length  # characters: few texts need as many a token, and the rare one below is read on
        for start in spread(max(len(text) - width, 0), share):
            ids: list[int] = []
            while len(ids) < length:
                ids = tokenizer.encode(text[start : start + width], add_special_tokens=False, verbose=False)
                if len(ids) < length and width >= len(text):
                    raise InputError(
                        f"text {i + 1} has {len(ids)} tokens, fewer than one window of {length}; "
                        "give a longer text or a smaller --length"
                    )
                start, width = (start, width) if len(ids) >= length else (0, 2 * width)
            pieces.append(torch.tensor(ids[:length]))
    return pieces


@torch.inference_mode()
def calibrate(
    model: Any, windows: Sequence[Tensor], span: int | None = None, progress: Callable[[int, int], None] | None = None
) -> list[ChannelStats]:
    """Mean and standard deviation of post-RoPE K and of V of every layer, KV head and channel.

    `windows`: pieces of text, int64 [length] each, longer than the sinks. They are run at positions spread over `span`
    (the model's window, at most 32768, unless given). `progress(done, all)` is called after each. Raises InputError for
    no window, or one that is too short or too long for `span`, and FormatError where the model yields inf or NaN.
    """
    text_config = model.config.get_text_config()
    limit = getattr(text_config, "max_position_embeddings", None) or MAX_SPAN
    span = min(limit, MAX_SPAN) if span is None else span
    if not windows:
        raise InputError("no windows of text; calibration needs one or more")
    for ids in windows:
        if not SINKS < len(ids) <= span:
            raise InputError(
                f"a window has {len(ids)} tokens; calibration takes {SINKS + 1} to {span}, the positions they are "
                "spread over: choose --length and --span accordingly"
            )
    recorder = _Recorder()
    with recorder.installed(model):
        return _measure(model, windows, span, progress, recorder)


def _measure(
    model: Any,
    windows: Sequence[Tensor],
    span: int,
    progress: Callable[[int, int], None] | None,
    recorder: _Recorder,
) -> list[ChannelStats]:
    from transformers import DynamicCache

    text_config = model.config.get_text_config()
    body, device = model.base_model, model.get_input_embeddings().weight.device
    moments: list[tuple[_Moments, _Moments]] = []
    step = _coprime_step(len(windows))
    for i, ids in enumerate(windows):
        length = len(ids)
        # Scattered, so that the place in the text and the position do not grow together.
        offset = spread(span - length, len(windows))[i * step % len(windows)]
        chunk = ids.to(device)[None]
        cache = DynamicCache(config=model.config)
        body(
            input_ids=chunk,
            attention_mask=torch.ones_like(chunk),
            position_ids=torch.arange(offset, offset + length, device=device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        if not moments:
            moments = [(_Moments(), _Moments()) for _ in cache.layers]
        for layer, ((of_k, of_v), stored) in enumerate(zip(moments, cache.layers, strict=True)):
            # A sliding layer holds its newest tokens only: no sinks among them.
            skip = SINKS if stored.keys.shape[2] == length else 0
            for name, sums, rows in (("K", of_k, stored.keys), ("V", of_v, stored.values)):
                if not bool(rows.isfinite().all()):
                    raise FormatError(
                        f"{name} of layer {layer} holds inf or NaN in window {i}; load the model in bfloat16 or float32"
                    )
                sums.add(rows[0, :, skip:].transpose(0, 1))
        if progress is not None:
            progress(i + 1, len(windows))
    stats = []
    for layer, (of_k, of_v) in enumerate(moments):
        (k_mean, k_scale), (v_mean, v_scale) = of_k.result(), of_v.result()
        order = channel_order(text_config, k_mean.shape[1]).to(k_mean.device)
        basis = recorder.layers[layer].basis(k_mean) if layer in recorder.layers else None
        stats.append(ChannelStats(k_mean, k_scale, v_mean, v_scale, order, basis).to("cpu"))
    return stats


def _coprime_step(n: int) -> int:
    """About 0.618 n and coprime to n, so that its multiples visit every remainder in a scattered order."""
    step = max(1, round(0.618 * n))
    while math.gcd(step, n) != 1:
        step += 1
    return step


def save_calibration(path: Path, stats: list[ChannelStats], identity: ModelIdentity, about: str) -> None:
    """Write `stats`, one a layer, with the identity of their model and `about` (what they were measured on).

    Raises InputError where the file cannot be written, FormatError where layers differ in shape.
    """
    if len({(s.heads, s.head_dim) for s in stats}) != 1:
        raise FormatError("calibration: layers with different numbers of KV heads or channels cannot share a file")
    tensors = {name: torch.stack([getattr(s, name) for s in stats]).contiguous() for name in _FIELDS}
    bases = [s.key_basis for s in stats]
    if all(basis is not None for basis in bases):
        tensors["key_basis"] = torch.stack([basis.half() for basis in bases if basis is not None]).contiguous()
    tensors["order"] = torch.stack([s.order for s in stats]).to(torch.int32).contiguous()
    metadata = {"kind": "hisparse.calibration", "version": FILE_VERSION, "about": about, **identity.to_metadata()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written here: the library's own writer would make a file that its owner alone may read.
        part = path.with_name(f"{path.name}.tmp")
        part.write_bytes(save(tensors, metadata))
        part.replace(path)
    except OSError as error:
        raise InputError(f"calibration file {path}: cannot be written ({error}); choose another --output") from None


def _read(path: Path) -> tuple[dict[str, str], Callable[[str], Tensor]]:
    """The file's metadata, and a reader of its tensors."""
    if not path.is_file():
        raise ModelError(
            f"calibration file {path}: not found; make it with `hisparse calibrate`, or leave the option out"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # copied: a view of the mapped file would turn into a crash when the file is written again
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ModelError(f"calibration file {path}: damaged or not safetensors ({error}); make it anew") from None
    if metadata.get("kind") != "hisparse.calibration":
        raise ModelError(f"calibration file {path}: kind is {metadata.get('kind')!r}, not 'hisparse.calibration'")
    if metadata.get("version") != FILE_VERSION:
        raise ModelError(
            f"calibration file {path}: version {metadata.get('version')!r}, this hisparse reads {FILE_VERSION}; "
            "make it anew with `hisparse calibrate`"
        )
    missing = [name for name in (*_FIELDS, "order", "key_basis") if name not in tensors]
    if missing:
        raise ModelError(
            f"calibration file {path}: has no {', '.join(missing)}; make it anew with `hisparse calibrate`"
        )
    return metadata, tensors.__getitem__


def load_calibration(path: str | Path, identity: ModelIdentity | None) -> list[ChannelStats]:
    """Statistics of every layer from a file that `hisparse calibrate` wrote.

    Raises ModelError where the file is missing or damaged, or was made for another model than `identity` (None:
    unchecked).
    """
    from hisparse.identity import ModelIdentity

    path = Path(path)
    metadata, tensor = _read(path)
    if identity is not None:
        ModelIdentity.from_metadata(metadata).check(identity, f"calibration file {path}")
    fields = [tensor(name).float() for name in _FIELDS]
    order = tensor("order").long()
    basis = tensor("key_basis")
    try:
        return [
            ChannelStats(k_mean, k_scale, v_mean, v_scale, order[i], basis[i].float())
            for i, (k_mean, k_scale, v_mean, v_scale) in enumerate(zip(*fields, strict=True))
        ]
    except (FormatError, IndexError, ValueError) as error:
        raise ModelError(
            f"calibration file {path}: damaged ({error}); make it anew with `hisparse calibrate`"
        ) from None


def calibration_for(identity: ModelIdentity, path: str | Path | None = None) -> list[ChannelStats] | None:
    """The calibration of a model: the file at `path`, else the shipped file made for this model, else None.

    Raises ModelError where `path` is given but missing, damaged or of another model.
    """
    from hisparse.identity import ModelIdentity

    if path is not None:
        return load_calibration(path, identity)
    folder = importlib.resources.files("hisparse") / "data"
    if not folder.is_dir():
        return None
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(SUFFIX):
            with importlib.resources.as_file(entry) as file:
                if ModelIdentity.from_metadata(_read(file)[0]).matches(identity):
                    return load_calibration(file, None)
    return None
