"""The papers' Figure 4 on the hardware of the rows: time per token against the length, and who passes exact where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, exp, log
from typing import Any

from .._rows import Row
from .bench import PASSES, PEER
from .plots import OTHER, STYLE, _handle, _line, as_png, canvas, plain_log_ticks, rules, short, style_of
from .speed_table import spaced
from .words import counted, human_error

Curve = dict[int, float]  # length -> seconds per token
FLOOR = "#999999"
KINDS = (  # of figures that a row holds: key, unit, title
    ("seconds_per_token", 1e6, "time per token (µs)"),
    ("memory_per_token", 1 / 1024, "peak extra memory per token (KiB)"),
    ("error", 1.0, "relative error of the output"),
)


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
                _draw(axis, label, {n: 1e6 * seconds for n, seconds in curve.items()}, labels)
            floors = [row for row in rows if row["pass"] == which and row.get("floor_seconds")]
            if floors:
                floor = min(row["floor_seconds"] / (row["b"] * row["n"]) for row in floors)
                axis.axhline(floor * 1e6, color=FLOOR, lw=1.2, zorder=1)
            lengths = sorted({n for curve in drawn[which].values() for n in curve})
            axis.set(xscale="log", yscale="log", title=which, xlabel="length N (tokens)")
            axis.set_xticks(lengths, [_brief(n) for n in lengths])
            axis.minorticks_off()
            _mark_crossings(axis, drawn[which], labels)
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
        handles = _handles(labels, "exact (the best SDPA)")
        handles.append(_line(FLOOR, 1.2, 1.0, "floor: q, k, v, out (and gradients) once through memory"))
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
        return as_png(figure)


def scaling(rows: Sequence[Row]) -> bytes:
    """Time and peak memory per token against the length, a line of panels for each pass; and the error of the output.
    Rings mark where a method passes exact attention."""
    with rules():
        passes = list(dict.fromkeys(row["pass"] for row in rows))
        rows = [row for row in rows if not row.get("failed")]
        labels = list(dict.fromkeys(row["method"] for row in rows))
        kinds = [(key, unit, title) for key, unit, title in KINDS if any(row.get(key) for row in rows)]
        figure = canvas(4.6 * len(kinds) + 1.9, 3.7 * len(passes) + 0.3)
        axes = figure.subplots(len(passes), len(kinds), squeeze=False, sharex=True)
        lengths = sorted({row["n"] for row in rows})
        for i, which in enumerate(passes):
            for axis, (key, unit, title) in zip(axes[i], kinds, strict=True):
                if key == "error" and i:  # the same answers
                    axis.set_axis_off()
                    continue
                drawn = curves([row for row in rows if row.get(key)], which, key)
                for label, curve in drawn.items():
                    _draw(axis, label, {n: unit * each for n, each in curve.items()}, labels)
                axis.set(xscale="log", yscale="log", title=title if key == "error" else f"{which}: {title}")
                axis.set_xticks(lengths, [spaced(n) for n in lengths])
                axis.minorticks_off()
                if key == "seconds_per_token":
                    _mark_crossings(axis, drawn, labels)
                plain_log_ticks(axis.yaxis)
                axis.grid(True, which="major")
                if i == len(passes) - 1 or key == "error":
                    axis.set_xlabel("length N (tokens)")
                    axis.tick_params(labelbottom=True)
        one = rows[0]
        machine = one["environment"]["hardware"]
        if one["device"] == "cpu":
            machine += f", {counted(one['environment']['threads'], 'thread')}"
        figure.suptitle(
            f"{machine}, {one['dtype']}, batch {one['b']} × {one['h']} heads × {one['d']}"
            + (", causal" if one["causal"] else ""),
            size=9.5,
            color="#555555",
        )
        handles = _handles(labels, "exact (SDPA)")
        figure.legend(handles=handles, loc="outside right center")
        return as_png(figure)


def against_length(rows: Sequence[Row], pays_from: int | None) -> bytes:
    """Seconds of a call, exact and ours, against the length: filled marks were measured, hollow ones predicted; a line
    where ours begins to pay."""
    with rules():
        figure = canvas(6.6, 4.6)
        axis = figure.subplots()
        labels = list(dict.fromkeys(row["method"] for row in rows))
        for label in labels:
            colour, marker, line = _style(label, labels)
            mine = [row for row in rows if row["method"] == label]
            axis.plot([row["n"] for row in mine], [row["seconds"] for row in mine], color=colour, ls=line, lw=1.8)
            for row in mine:
                face = colour if row["measured"] else "white"
                axis.plot(row["n"], row["seconds"], marker, ms=9 if label == PEER else 7, mfc=face, mec=colour)
        lengths = sorted({row["n"] for row in rows})
        if pays_from is not None:
            axis.axvline(pays_from, color="#555555", lw=1.0, ls=":")
            words = f"pays from {spaced(pays_from)}"
            past = pays_from > (lengths[0] * lengths[-1]) ** 0.5  # write towards the middle
            axis.annotate(
                words,
                (pays_from, 0.03),
                xycoords=("data", "axes fraction"),
                xytext=(-5 if past else 5, 0),
                textcoords="offset points",
                ha="right" if past else "left",
                size=9,
                color="#555555",
            )
        axis.set(xscale="log", yscale="log", xlabel="length N (tokens)", ylabel="time of a call (s)")
        axis.set_xticks(lengths, [spaced(n) for n in lengths], rotation=30)
        axis.minorticks_off()
        plain_log_ticks(axis.yaxis)
        axis.grid(True, which="major")
        one = rows[0]
        axis.set_title(f"{one['environment']['hardware']}, {one['dtype']}, {one['pass']}", size=9.5, color="#555555")
        handles = _handles(labels, "exact (SDPA)")
        if not all(row["measured"] for row in rows):
            handles.append(_handle(("#555555", "o"), "hollow: predicted from multiply-adds"))
            handles[-1].set_markerfacecolor("white")
        figure.legend(handles=handles, loc="outside lower center")
        return as_png(figure)


def crossing_sentences(rows: Sequence[Row]) -> list[str]:
    """For each pass, in a sentence: from which length a method is ahead of exact attention, and how far off it is."""
    found = []
    for which in dict.fromkeys(row["pass"] for row in rows):
        drawn, errors = curves(rows, which), curves([row for row in rows if row.get("error")], which, "error")
        exact, words = drawn.pop(PEER, {}), []
        same = {(row["method"], row["n"]) for row in rows if row["pass"] == which and row.get("error") == 0}
        for label, every in drawn.items():  # whose answer is exact attention's own, bit for bit, is not ahead of it
            curve = {n: each for n, each in every.items() if (label, n) not in same}
            if not curve:
                words.append(f"{label} is exact attention up to {spaced(max(every))}")
                continue
            at = crossing(curve, exact)
            if at is None:
                words.append(f"{label} does not overtake it up to {spaced(max(curve))}")
                continue
            mine = errors.get(label, {})
            nearest = min((n for n in mine if n >= at[0]), default=None)
            off = "" if nearest is None else f" (error {human_error(mine[nearest])} at {spaced(nearest)})"
            words.append(f"{label} is ahead from N = {_about(*at)}{off}")
        if exact and words:
            found.append(f"{which}, beside exact attention: {'; '.join(words)}.")
    return found


def _handles(labels: Sequence[str], exact: str) -> list[Any]:
    """For the legend: each method as its curve is drawn."""
    made = []
    for label in labels:
        colour, marker, line = _style(label, labels)
        made.append(_handle((colour, marker), exact if label == PEER else short(label), line=True))
        made[-1].set_linestyle(line)
    return made


def _draw(axis: Any, label: str, curve: Curve, labels: Sequence[str]) -> None:
    colour, marker, line = _style(label, labels)
    peer = label == PEER
    axis.plot(
        list(curve),
        list(curve.values()),
        color=colour,
        marker=marker,
        ms=9 if peer else 6,
        mec="white",
        mew=0.6,
        lw=2.2 if peer else 1.5,
        ls=line,
        zorder=2 if peer else 3,
    )


def _about(at: float, measured: bool) -> str:
    return spaced(int(round(at, -1 if at >= 1000 else 0))) if measured else f"{spaced(int(at))} or less"


def _mark_crossings(axis: Any, drawn: Mapping[str, Curve], labels: Sequence[str]) -> None:
    """A ring where a method passes exact attention, and its length in the upper corner, for which room is made: in two
    columns where they are many."""
    exact = drawn.get(PEER, {})
    lines = {label: curve for label, curve in drawn.items() if label != PEER and len(set(curve) & set(exact)) > 1}
    found = {label: crossing(curve, exact) for label, curve in lines.items()}
    passed = sorted((spot[0], spot[1], label) for label, spot in found.items() if spot is not None)
    corner, lines_of = axis.transAxes, len(passed) if len(passed) <= 4 else ceil(len(passed) / 2)
    if passed:
        heights = [1e6 * height for curve in drawn.values() for height in curve.values()]
        low, high = axis.get_ylim()[0], 1.3 * max(heights)
        taken = 0.06 * (lines_of + 1)  # of the height
        axis.set_ylim(low, max(high * (high / low) ** (taken / (1 - taken)), axis.get_ylim()[1]))  # panels share it
        axis.text(0.03, 0.97, "ahead from N =", transform=corner, va="top", size=8.5, color="#555555")
    for place, (at, measured, label) in enumerate(passed):
        colour, marker, _ = _style(label, labels)
        axis.plot(at, _between(exact, at) * 1e6, "o", ms=12, mfc="none", mec=colour, mew=1.8, zorder=4)
        left, height = 0.045 + 0.24 * (place // lines_of), 0.905 - 0.055 * (place % lines_of)
        axis.plot(left, height, marker, ms=6, color=colour, mec="white", mew=0.6, transform=corner)
        length = _about(at, measured)
        axis.text(left + 0.03, height, length, transform=corner, va="center", size=8.5, weight="bold", color=colour)


def _style(label: str, labels: Sequence[str]) -> tuple[str, str, str]:
    """A method's colour, marker and line; a second setting of the same method takes another marker and is dotted."""
    colour, marker = style_of(label)
    if label == PEER:
        return colour, marker, "--"
    alike = sorted((each for each in labels if each.split(":")[0] == label.split(":")[0]), key=lambda each: ":" in each)
    at = alike.index(label)  # as it comes first, if it is there
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
