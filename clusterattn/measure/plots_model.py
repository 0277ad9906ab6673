"""Pictures of a pretrained model with other attention in it, as PNG bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._extras import need
from .._rows import Row
from .plots import _handle, as_png, canvas, plain_log_ticks, rules, short, style_of

HEAT_PANELS = 4
WRITTEN_CELLS = 200  # a heat map with more cells than this has colours alone


def tradeoff(rows: Sequence[Row]) -> bytes:
    """Error of the hidden states, and the task's metric, against the share of exact attention's multiply-adds.

    A line joins the settings of one method from cheap to dear.
    """
    exact, *others = rows
    both = exact["task"] != "hidden"
    with rules():
        figure = canvas(11.5 if both else 7.5, 4.6)
        axes = figure.subplots(1, 2 if both else 1, squeeze=False)[0]
        for axis, key in zip(axes, ("error", "value"), strict=False):
            for name in dict.fromkeys(row["name"] for row in others):
                colour, marker = style_of(name)
                family = [row for row in others if row["name"] == name]
                spots = sorted((row["cost_share"], row[key] or 1e-9) for row in family)
                axis.plot(*zip(*spots, strict=True), color=colour, lw=1.3, alpha=0.55, zorder=2)
                axis.scatter(*zip(*spots, strict=True), color=colour, marker=marker, s=70, zorder=3, ec="white", lw=0.8)
                label_points(axis, [(row["cost_share"], row[key] or 1e-9, row["method"]) for row in family], colour)
            axis.axvline(1, color="black", lw=1, ls=(0, (4, 3)), zorder=1)
            axis.set(xscale="log", xlabel="multiply-adds, exact attention = 1 (grouping included)")
            plain_log_ticks(axis.xaxis)
            axis.grid(True, which="major")
        axes[0].set(yscale="log", title="Hidden states", ylabel="relative error of the last hidden states")
        plain_log_ticks(axes[0].yaxis)
        if both:
            axes[1].axhline(exact["value"], color="black", lw=1, zorder=1)
            axes[1].annotate("exact", (1, exact["value"]), xytext=(4, 3), textcoords="offset points", size=8)
            if flattened([row["value"] for row in rows]):
                axes[1].set_yscale("log")
                plain_log_ticks(axes[1].yaxis)
            better = "higher" if exact["higher_is_better"] else "lower"
            axes[1].set(title=exact["metric"].capitalize(), ylabel=f"{exact['metric']} ({better} is better)")
        handles = [_handle(style_of(name), name, line=True) for name in dict.fromkeys(row["name"] for row in others)]
        figure.legend(handles=handles, loc="outside right center")
        return as_png(figure)


def label_points(axis: Any, points: Sequence[tuple[float, float, str]], colour: str) -> None:
    """The settings of a method beside each of its points; `default` where there are none."""
    for x, y, label in points:
        settings = label.partition(":")[2].replace(",", "\n")
        place = {"xytext": (6, 3), "textcoords": "offset points", "size": 6.5, "color": colour, "va": "bottom"}
        axis.annotate(settings or "default", (x, y), zorder=4, **place)


def flattened(values: Sequence[float], times: float = 30.0) -> bool:
    """Does one value lie so far above the others that a linear axis would press them into a line?"""
    ordered = sorted(values)
    return len(ordered) > 2 and ordered[0] > 0 and ordered[-1] > times * ordered[len(ordered) // 2]


def heat(errors: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """Relative error of every head (columns) of every layer (rows), one panel for each method, on one colour scale."""
    shown = {label: layers for label, layers in errors.items() if layers}
    shown = dict(list(shown.items())[:HEAT_PANELS])
    names = list(dict.fromkeys(name for layers in shown.values() for name in layers))
    wide = max(len(each) for layers in shown.values() for each in layers.values())
    grids = {label: _grid(layers, names, wide) for label, layers in shown.items()}
    values = torch.cat([grid.flatten() for grid in grids.values()])
    values = values[values.isfinite() & (values > 0)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (1e-3, 1.0)
    with rules():
        across = min(len(grids), 2)
        down = -(-len(grids) // 2)
        figure = canvas(2.4 + (0.36 * wide + 1.2) * across, (1.2 + 0.36 * len(names)) * down)
        axes = figure.subplots(down, across, squeeze=False, sharey=True)
        for axis in axes.flat[len(grids) :]:
            axis.set_axis_off()
        norm = need("matplotlib.colors").LogNorm(vmin=max(low, 1e-6), vmax=max(high, 2e-6, low * 1.01))
        for axis, (label, grid) in zip(axes.flat, grids.items(), strict=False):
            image = axis.imshow(grid.clamp_min(1e-12).numpy(), norm=norm, cmap="YlOrRd", aspect="auto")
            axis.set_title(short(label), size=9)
            axis.set_xticks(range(0, wide, 1 if wide <= 16 else 4))
            axis.set_yticks(range(len(names)), tails(names), size=8)
            axis.set_xlabel("head")
            axis.tick_params(length=0)
            for spine in axis.spines.values():
                spine.set_visible(False)
            if grid.numel() <= WRITTEN_CELLS:
                _write_cells(axis, grid, norm)
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.015, aspect=30)
        bar.set_label("relative error of the head's output")
        bar.outline.set_visible(False)
        plain_log_ticks(bar.ax.yaxis)
        return as_png(figure)


def _grid(layers: Mapping[str, Tensor], names: Sequence[str], wide: int) -> Tensor:
    grid = torch.full((len(names), wide), float("nan"))
    for i, name in enumerate(names):
        if name in layers:
            grid[i, : len(layers[name])] = layers[name].float()
    return grid


def _write_cells(axis: Any, grid: Tensor, norm: Any) -> None:
    for i, row in enumerate(grid.tolist()):
        for j, value in enumerate(row):
            if value == value:
                dark = norm(max(value, 1e-12)) > 0.6
                small = f"{value:.0e}".replace("e-0", "e-") if value >= 1e-5 else "0"
                text = f"{value:.2f}".lstrip("0") if value >= 0.01 else small
                axis.text(j, i, text, ha="center", va="center", size=6, color="white" if dark else "#333333")


def tails(names: Sequence[str]) -> list[str]:
    """Layer names without what all of them share at the beginning and at the end."""
    words = [name.split(".") for name in names]
    if len(words) < 2:
        return list(names)
    first = last = 0
    while all(len(each) > first + 1 and each[first] == words[0][first] for each in words):
        first += 1
    while all(len(each) > first + last + 1 and each[-1 - last] == words[0][-1 - last] for each in words):
        last += 1
    tails = [".".join(each[first : len(each) - last]) for each in words]
    return [f"layer {tail}" if tail.isdigit() else tail for tail in tails]
