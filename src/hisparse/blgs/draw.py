"""A picture of a block plan: position x channel, bright where tokens are kept, fading outward from the modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hisparse.blgs.plan import BlockPlan
from hisparse.errors import InputError

_WIDTH = 2048  # pixels of a row
_SHORTEST_ROW = 1024  # tokens
_MOST_ROWS = 12
_FAINTEST = 1 / 512  # density drawn one step above black
_STRIP = 14  # pixels of the strip of tokens under each row
_PAPER = np.array([16, 16, 20]) / 255
_ANCHOR = np.array([0.25, 0.85, 1.0])
_OTHER = np.array([1.0, 0.62, 0.2])
_FLOAT = NDArray[np.float64]


def draw_plan(plan: BlockPlan, path: Path | str, importance: Tensor, first: int = 0) -> None:
    """Write a PNG (or what the suffix of `path` says) of the plan; long sequences are wrapped in rows.

    Each row shows the blocks as tiles of their token length and channel width, coloured by the share of tokens kept
    (log scale); the strip below shows anchors (blue), other kept tokens (orange) and the importance of the rest (grey).

    Args:
        path: file to write; its directory must exist.
        importance: float [T], what the plan was made from.
        first: position in the text of the plan's first token, for the labels.

    Raises:
        InputError: importance has not T values, or the file cannot be written.
    """
    if importance.shape != (plan.length,):
        raise InputError(
            f"importance has shape {tuple(importance.shape)}, the plan covers {plan.length} tokens; "
            "draw a plan with the importance it was made from"
        )
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    plan = plan.to("cpu")
    p = importance.detach().double().cpu().numpy()
    row_tokens = _row_tokens(plan.length)
    rows = max(1, -(-plan.length // row_tokens))
    height = int(np.clip(2200 // rows, 56, min(224, max(plan.channels, 96))))
    palette = matplotlib.colormaps["inferno"]

    gap, top, bottom, left, right, scale = 26, 110, 76, 140, 170, 100
    full = (top + rows * (height + _STRIP + gap) + bottom, left + _WIDTH + right)
    figure = Figure(figsize=(full[1] / scale, full[0] / scale), dpi=scale, facecolor=tuple(_PAPER))
    FigureCanvasAgg(figure)
    for row in range(rows):
        at = row * row_tokens
        image = _row(plan, p, at, row_tokens, height, palette)
        lower = full[0] - top - row * (height + _STRIP + gap) - image.shape[0]
        axes = figure.add_axes(
            (left / full[1], lower / full[0], _WIDTH / full[1], image.shape[0] / full[0]), facecolor=tuple(_PAPER)
        )
        axes.imshow(image, aspect="auto", interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([0, height - 1], ["0", str(plan.channels)])
        axes.tick_params(colors="#b0b0b8", labelsize=10, length=3)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_ylabel(f"{first + at:,}", color="#e8e8ee", fontsize=13, rotation=0, labelpad=38, va="center")
    write: dict[str, Any] = {"color": "#b0b0b8", "fontsize": 12, "va": "bottom"}
    figure.text(
        left / full[1], 1 - 44 / full[0], "Block plan: position × channel", color="#ffffff", fontsize=19, va="bottom"
    )
    figure.text(
        left / full[1],
        1 - 82 / full[0],
        f"{plan.length:,} tokens, {row_tokens:,} a row   ·   {plan.n_blocks:,} blocks ({plan.n_tiles:,} tiles) around "
        f"{len(plan.modes):,} modes   ·   kept {plan.n_kept:,} = {100 * plan.density:.1f} %, "
        f"of them {plan.n_anchors:,} anchors",
        **write,
    )
    x = left / full[1]
    for text, colour in (
        ("strip below each row:", "#b0b0b8"),
        ("■ anchor", _ANCHOR),
        ("■ other token kept", _OTHER),
        ("■ importance of the rest", "#8a8a92"),
    ):
        figure.text(x, 26 / full[0], text, color=colour, fontsize=12, va="bottom")
        x += (len(text) * 9 + 30) / full[1]
    bar_height = min(360, full[0] - top - bottom)
    bar_axes = figure.add_axes(
        (
            (left + _WIDTH + 40) / full[1],
            (full[0] - top - bar_height) / full[0],
            22 / full[1],
            bar_height / full[0],
        )
    )
    bar = figure.colorbar(ScalarMappable(LogNorm(_FAINTEST, 1), palette), cax=bar_axes)
    ticks = [1, 1 / 4, 1 / 16, 1 / 64, 1 / 256]
    bar.set_ticks(ticks, labels=[f"{100 * tick:.3g} %" for tick in ticks])
    bar.ax.minorticks_off()
    bar.ax.tick_params(colors="#b0b0b8", labelsize=10)
    bar.set_label("tokens kept in a block", color="#b0b0b8", fontsize=11)
    try:
        figure.savefig(path, dpi=scale, facecolor=figure.get_facecolor())
    except (OSError, ValueError) as error:
        raise InputError(f"picture {path}: cannot be written ({error}); give the path of a .png file") from None


def _row_tokens(length: int) -> int:
    """Tokens a row shows: a power of two, so that blocks do not straddle rows."""
    tokens = _SHORTEST_ROW
    while tokens * _MOST_ROWS < length:
        tokens *= 2
    return tokens


def _row(plan: BlockPlan, p: _FLOAT, first: int, row_tokens: int, height: int, palette: Any) -> _FLOAT:
    """RGB [height + strip, _WIDTH, 3] in [0, 1] of the positions from `first` on."""
    length = min(row_tokens, plan.length - first)
    per_pixel = row_tokens / _WIDTH
    pixels = max(1, min(_WIDTH, int(np.ceil(length / per_pixel))))
    image = np.broadcast_to(_PAPER, (height + _STRIP, _WIDTH, 3)).copy()
    if length <= 0:
        return image
    edges = first + np.minimum(np.floor(np.arange(pixels) * per_pixel).astype(np.int64), length - 1)

    # Tiles: a soft elliptical shade within each shows its borders, as far as pixels resolve them.
    centre = first + np.minimum((np.arange(pixels) + 0.5) * per_pixel, length - 0.5)
    block = np.searchsorted(plan.start.numpy(), centre, side="right") - 1
    start, tokens = plan.start.numpy()[block], plan.tokens.numpy()[block]
    width, density = plan.channel_width.numpy()[block], plan.block_density.double().numpy()[block]
    channel = (np.arange(height) + 0.5) * plan.channels / height
    along = (centre - start) / tokens * 2 - 1
    across = (channel[:, None] % width) / np.minimum(width, plan.channels - channel[:, None] // width * width) * 2 - 1
    along = np.where(tokens / per_pixel >= 6, along, 0)[None]
    across = np.where(width * height / plan.channels >= 4, across, 0)
    shade = 1 - 0.42 * np.minimum(along**4 + across**4, 1)
    light = np.clip(1 - np.log(np.maximum(density, 1e-9)) / np.log(_FAINTEST), 0, 1)
    light = 0.05 + 0.95 * light
    image[:height, :pixels] = palette(np.broadcast_to(light, shade.shape))[..., :3] * shade[..., None]

    # Tokens: grey is importance; a pixel of many tokens takes the colour of those kept by their share (square root, so
    # that single ones show).
    spans = np.diff(np.append(edges, first + length)).clip(min=1)

    def mean(values: NDArray[Any]) -> _FLOAT:
        sums: _FLOAT = np.add.reduceat(values[: first + length].astype(np.float64), edges)
        shares: _FLOAT = (sums / spans)[:, None]
        return shares

    anchors, kept = mean(plan.anchor.numpy()), mean(plan.keep.numpy())
    colour = (_ANCHOR * anchors + _OTHER * (kept - anchors)) / np.maximum(kept, 1e-12)
    strip = (0.08 + 0.45 * mean(p)) * (1 - np.sqrt(kept)) + colour * np.sqrt(kept)
    image[height + 3 :, :pixels] = strip[None]
    return image
