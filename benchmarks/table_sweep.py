"""The table of random settings: where time does not follow multiply-adds."""

from __future__ import annotations

from sweep import PYTHON, WITHIN, WITHIN_MORE, Case
from table_words import NOT_YET, origin, rows, spaced, table

from clusterattn.measure import Row

SHOWN = 6


def sweep_table() -> str:
    """The rows of benchmarks/sweep.py on a CPU: how many settings keep its rule, and those that break it most."""
    newest = {(row["method"], row["n"], row["m"], row["d"], row["e"]): row for row in rows("sweep")}
    found = [row for row in newest.values() if not row["environment"]["hardware"].startswith("NVIDIA")]
    ruled = [row for row in found if Case(**{name: row[name] for name in Case.__dataclass_fields__}).must_be_within]
    if not ruled:
        return NOT_YET
    kept = sum(_of_the_rule(row) <= 1 for row in ruled)
    worst = sorted(ruled, key=_of_the_rule, reverse=True)[:SHOWN]
    body = [
        (
            f"`{row['method']}`",
            f"{spaced(row['n'])} × {spaced(row['m'])}, {row['d']}",
            f"{row['time_share']:.2f}",
            f"{row['cost_share']:.2f}",
            f"{_of_the_rule(row):.2f}",
        )
        for row in worst
    ]
    head = ("setting", "queries × keys, head dim", "time, exact = 1", "multiply-adds, exact = 1", "times the rule")
    told = f"{kept} of {len(ruled)} random settings keep the rule; the farthest from it:"
    return f"{told}\n\n{table(head, body, words=2)}{origin(worst, 'forward, float32')}"


def _of_the_rule(row: Row) -> float:
    return float(row["time_share"] / (WITHIN * row["cost_share"] + WITHIN_MORE + PYTHON / row["sdpa_seconds"]))
