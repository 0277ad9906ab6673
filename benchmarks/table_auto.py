"""The table of the default method against SDPA: it may not be the slower one, at any length."""

from __future__ import annotations

from itertools import product

from table_words import NOT_YET, origin, rows, spaced, table

from clusterattn.measure import Row

KINDS = tuple(product(("forward", "forward+backward"), ("eager", "graph")))  # pass, how it is called


def auto_table() -> str:
    """The rows of benchmarks/auto.py: a line for each length, causal and not, how many times as fast as SDPA."""
    newest = {_key(row): row for row in rows("auto")}
    if not newest:
        return NOT_YET
    lines: dict[tuple[str, int, int, bool, int], dict[tuple[str, str], Row]] = {}
    for key, row in newest.items():
        lines.setdefault(key[:-2], {})[row["pass"], row["how"]] = row
    body = [
        (
            f"{hardware}, {h} × {d}" + (", causal" if causal else ""),
            spaced(n),
            ", ".join(dict.fromkeys(f"`{row['chosen']}`" for row in line.values())),
            *(_speed(line.get(kind)) for kind in KINDS),
        )
        for (hardware, h, d, causal, n), line in sorted(lines.items())
    ]
    found = list(newest.values())
    kept = sum(row["met"] for row in found)
    head = ("device", "N", "takes", *(f"{name.replace('+', ' + ')}, {how}" for name, how in KINDS))
    kinds = ", ".join(dict.fromkeys(str(row["dtype"]) for row in found))
    told = f"{kept} of {len(found)} rows are inside the rule (at most 5 % or 20 µs slower than SDPA)."
    return f"{told}\n\n{table(head, body, words=3)}{origin(found, kinds)}"


def _key(row: Row) -> tuple[str, int, int, bool, int, str, str]:
    return row["environment"]["hardware"], row["h"], row["d"], row["causal"], row["n"], row["pass"], row["how"]


def _speed(row: Row | None) -> str:
    if row is None:
        return "–"
    told = f"{row['speedup']:.2f}×"
    return (f"**{told}**" if row["chosen"] != "exact" and row["speedup"] > 1 else told) + ("" if row["met"] else "†")
