"""The papers' Figure 4 on the hardware of the rows: time per token against the length, and who passes exact where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

from .._rows import Row
from .bench import PASSES, PEER
from .plots import OTHER, STYLE, _handle, _line, as_png, canvas, plain_log_ticks, rules, short, style_of
from .speed_table import spaced

Curve = dict[int, float]  # length -> seconds per token
FLOOR = "#999999"


def crossing(ours: Mapping[int, float], exact: Mapping[int, float]) -> tuple[float, bool] | None:
    """The length from which a method stays ahead, between two measured ones on straight lines in log-log scale.

    With it: was it measured on both sides? (False: it was ahead at the shortest common length.) None: never ahead.
    """
    lengths = sorted(set(ours) & set(exact))
    behind = [n for n in lengths if ours[n] >= exact[n]]
    if not lengths or behind[-1:] == lengths[-1:]:
        return None
    if not behind:
        return float(lengths[0]), False
    left = behind[-1]
    right = lengths[lengths.index(left) + 1]
    lag, lead = (log(ours[n] / exact[n]) for n in (left, right))  # lag >= 0 > lead
    return exp(log(left) + (log(right) - log(left)) * lag / (lag - lead)), True


def curves(rows: Sequence[Row], which: str, key: str = "seconds_per_token") -> dict[str, Curve]:
    """Label -> its curve for one pass; a later row replaces an earlier one, what failed has no point."""
    found: dict[str, Curve] = {}
    for row in rows:
        if row["pass"] == which:
            curve = found.setdefault(row["method"], {})
            curve.pop(row["n"], None)
            if not row.get("failed"):
                curve[row["n"]] = row[key]
    return {label: dict(sorted(curve.items())) for label, curve in found.items() if curve}


def crossings(rows: Sequence[Row]) -> bytes:
    """Rows of one shape (heads, dtype) on one machine, all passes: a panel for each."""
    with rules():
        passes = [which for which in PASSES if any(row["pass"] == which for row in rows)]
        drawn = {which: curves(rows, which) for which in passes}
        labels = list(dict.fromkeys(label for which in passes for label in drawn[which]))
        figure = canvas(5.4 * len(passes) + 0.4, 4.9)
        axes = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
        for axis, which in zip(axes, passes, strict=True):
            for label, curve in drawn[which].items():
                colour, marker, line = _style(label, labels)
                peer = label == PEER
                axis.plot(
                    list(curve),
                    [seconds * 1e6 for seconds in curve.values()],
                    color=colour,
                    marker=marker,
                    ms=9 if peer else 6,
                    mec="white",
                    mew=0.6,
                    lw=2.2 if peer else 1.5,
                    ls=line,
                    zorder=2 if peer else 3,
                )
            _mark_crossings(axis, drawn[which], labels)
            floors = [row for row in rows if row["pass"] == which and row.get("floor_seconds")]
            if floors:
                floor = min(row["floor_seconds"] / (row["b"] * row["n"]) for row in floors)
                axis.axhline(floor * 1e6, color=FLOOR, lw=1.2, zorder=1)
            lengths = sorted({n for curve in drawn[which].values() for n in curve})
            axis.set(xscale="log", yscale="log", title=which, xlabel="length N (tokens)")
            axis.set_xticks(lengths, [_brief(n) for n in lengths])
            axis.minorticks_off()
            plain_log_ticks(axis.yaxis)
            axis.grid(True, which="major")
        axes[0].set_ylabel("time per token (µs)")
        one = rows[0]
        figure.suptitle(
            f"{one['environment']['hardware']}, {one['dtype']}, {one['h']} heads × {one['d']}: "
            "rings mark where a method passes exact attention",
            size=9.5,
            color="#555555",
        )
        handles = []
        for label in labels:
            colour, marker, line = _style(label, labels)
            words = "exact (the best SDPA)" if label == PEER else short(label)
            handles.append(_handle((colour, marker), words, line=True))
            handles[-1].set_linestyle(line)
        handles.append(_line(FLOOR, 1.2, 1.0, "floor: q, k, v, out (and gradients) once through memory"))
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        return as_png(figure)


def _mark_crossings(axis: Any, drawn: Mapping[str, Curve], labels: Sequence[str]) -> None:
    """A ring where a method passes exact attention, and its length in the empty corner above the short lengths."""
    exact = drawn.get(PEER, {})
    found = {label: crossing(curve, exact) for label, curve in drawn.items() if label != PEER}
    passed = sorted((spot[0], spot[1], label) for label, spot in found.items() if spot is not None)
    corner = axis.transAxes
    if passed:
        axis.text(0.03, 0.97, "ahead from N =", transform=corner, va="top", size=8.5, color="#555555")
    for place, (at, measured, label) in enumerate(passed):
        colour, marker, _ = _style(label, labels)
        axis.plot(at, _between(exact, at) * 1e6, "o", ms=12, mfc="none", mec=colour, mew=1.8, zorder=4)
        height = 0.905 - 0.055 * place
        axis.plot(0.045, height, marker, ms=6, color=colour, mec="white", mew=0.6, transform=corner)
        words = spaced(int(round(at, -1 if at >= 1000 else 0))) if measured else f"{spaced(int(at))} or less"
        axis.text(0.075, height, words, transform=corner, va="center", size=8.5, weight="bold", color=colour)


def _style(label: str, labels: Sequence[str]) -> tuple[str, str, str]:
    """A method's colour, marker and line; a second setting of the same method takes another marker and is dotted."""
    colour, marker = style_of(label)
    if label == PEER:
        return colour, marker, "--"
    at = [each for each in labels if each.split(":")[0] == label.split(":")[0]].index(label)
    spare = [marker, *(other for _, other in (*STYLE.values(), OTHER) if other not in (marker, "*"))]
    return colour, spare[at % len(spare)], ":" if at else "-"


def _between(curve: Mapping[int, float], n: float) -> float:
    """A curve's height at a length between two of its own, straight in log-log scale."""
    left, right = max(each for each in curve if each <= n), min(each for each in curve if each >= n)
    if left == right:
        return curve[left]
    share = log(n / left) / log(right / left)
    return exp(log(curve[left]) * (1 - share) + log(curve[right]) * share)


def _brief(n: int) -> str:
    return f"{n >> 20}M" if n >= 2**20 else f"{n >> 10}k" if n >= 1024 and n % 1024 == 0 else str(n)
