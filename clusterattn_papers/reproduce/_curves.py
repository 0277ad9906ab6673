"""Curves of time and memory against the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterattn.measure import plots

from ._readings import CHOSEN, DEFAULT, TASK

DOTTED: dict[str, Any] = {"lsh-1": ":", CHOSEN: ":", DEFAULT: "-.", TASK: (0, (4, 1, 1, 1, 1, 1))}
LEGIBLE = 1.3  # between two names on a logarithmic axis
Curves = dict[str, tuple[list[int], list[float]]]


def drawn_lines(panels: Sequence[tuple[str, Curves]]) -> bytes | None:
    """On logarithmic axes: attention that is written out would flatten the others."""
    if not any(drawn for _, drawn in panels):
        return None
    with plots.rules():
        figure = plots.canvas(5.0 * len(panels) + 2.0, 4.4)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        lines = {}
        for axis, (title, drawn) in zip(axes, panels, strict=True):
            for label, (lengths, heights) in drawn.items():
                colour, marker = plots.style_of(label)
                dotted = DOTTED.get(label, "--" if "written out" in label else "-")
                edge = {"mec": "white", "mew": 0.5}
                lines[label] = axis.plot(lengths, heights, color=colour, marker=marker, ms=7, ls=dotted, **edge)[0]
            axis.set(title=title, xlabel="length N (tokens)")
            axis.set(xscale="log", yscale="log")
            lengths = sorted({n for each, _ in drawn.values() for n in each})
            axis.set_xticks(lengths, legible(lengths), rotation=45 if len(lengths) > 7 else 0)
            axis.minorticks_off()
            plots.plain_log_ticks(axis.yaxis)
            axis.grid(True)
        figure.legend(handles=list(lines.values()), labels=list(map(plots.short, lines)), loc="outside right center")
        return plots.as_png(figure)


def legible(lengths: Sequence[int]) -> list[str]:
    """Their names, but for those that would stand on the one before."""
    names, last = [], 0.0
    for n in lengths:
        names.append(spaced(n) if n >= LEGIBLE * last else "")
        last = n if names[-1] else last
    return names


def spaced(n: int) -> str:
    return f"{n:,}".replace(",", " ")
