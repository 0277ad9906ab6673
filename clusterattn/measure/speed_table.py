"""The rows of a race as one table: a line for each method and shape, forward and forward + backward side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .._rows import Row
from .bench import PASSES, PEER

HEAD = (
    "method", "heads", "N", "batch",
    "forward µs", "× SDPA", "eager µs", "× SDPA", "forward+backward µs", "× SDPA", "eager µs", "× SDPA",
    "× floor", "error", "memory",
)  # fmt: skip
LEGEND = """\
µs         CUDA-graph replays, all stages included; ~ where no graph could be captured: timed eagerly
eager µs   called from Python, one call at a time
× SDPA     times as fast as the best SDPA backend called the same way in the same run
× floor    forward, in times of q, k, v and out once through memory (a copy measured in the same run)
error      of the output against exact attention, relative
memory     peak extra of forward+backward, in sizes of q, k, v, out and their gradients\
"""
NOTHING = "–"
FIRST = (PEER, "refined", "auto")
Line = dict[str, Row]  # pass -> row
KEYS = ("method", "h", "d", "n", "b", "dtype", "causal")


def joined(rows: Iterable[Row]) -> list[Line]:
    """Rows of one method and shape together, by pass; a later row replaces an earlier one."""
    found: dict[tuple[object, ...], Line] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in KEYS), {})[row["pass"]] = row
    return list(found.values())


def ordered(lines: Iterable[Line]) -> list[Line]:
    """By shape and length; exact attention first, then the defaults, then the methods as they came."""

    def place(line: Line) -> tuple[int, int, bool, int, int]:
        row = any_of(line)
        first = FIRST.index(row["method"]) if row["method"] in FIRST else len(FIRST)
        return row["h"], row["d"], bool(row["causal"]), row["n"], first

    return sorted(lines, key=place)


def any_of(line: Line) -> Row:
    return next(iter(line.values()))


def cells(line: Line) -> tuple[str, ...]:
    """The words of one line, as HEAD names them."""
    row, forward, both = any_of(line), *(line.get(which, {}) for which in PASSES)
    label = row["method"] if row["method"] != PEER else str(row.get("peer", PEER))
    return (
        label + (", causal" if row["causal"] else ""),
        f"{row['h']}×{row['d']}",
        spaced(row["n"]),
        str(row["b"]),
        *_speed(forward),
        *_speed(both),
        _number(forward.get("floor_ratio"), "{:.1f}"),
        _number(forward.get("error", both.get("error")), "{:.4f}"),
        _number(both.get("memory_of_size"), "{:.2f}"),
    )


def as_text(rows: Iterable[Row]) -> str:
    """For a terminal or a log: columns, the legend, and what failed and by how much."""
    lines = ordered(joined(rows))
    body = [HEAD, *(cells(line) for line in lines)]
    widths = [max(len(row[i]) for row in body) for i in range(len(HEAD))]
    text = [_aligned(row, widths) for row in body]
    text.insert(1, "─" * len(text[0]))
    return "\n".join([*text, "", LEGEND, *failures(lines)])


def failures(lines: Iterable[Line]) -> list[str]:
    """A sentence for each pass that has no time, and for each that could not be captured."""
    notes = []
    for row in (row for line in lines for row in line.values()):
        where = f"{row['method']}, {row['h']}×{row['d']}, N = {spaced(row['n'])}, {row['pass']}"
        if row.get("failed"):
            notes.append(f"{where}: {row['failed']}; not timed")
        elif row.get("why_eager"):
            notes.append(f"{where}: not captured in a graph ({row['why_eager']})")
    return notes


def microseconds(seconds: float) -> str:
    """Three digits, or all those before the point."""
    value = seconds * 1e6
    return spaced(round(value)) if value >= 100 else f"{value:.3g}"


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _speed(row: Row) -> tuple[str, str, str, str]:
    """As a graph, and called from Python: the time, and beside SDPA's."""
    if not row:
        return NOTHING, NOTHING, NOTHING, NOTHING
    if row.get("failed"):
        return "wrong" if str(row["failed"]).startswith("wrong") else "failed", NOTHING, NOTHING, NOTHING
    mark = "~" if row.get("why_eager") else ""
    return (
        mark + microseconds(row["seconds"]),
        _number(row.get("speedup"), "{:.2f}"),
        microseconds(row["eager_seconds"]) if row.get("eager_seconds") else NOTHING,
        _number(row.get("eager_speedup"), "{:.2f}"),
    )


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(word.rjust(width) for word, width in others)]).rstrip()
