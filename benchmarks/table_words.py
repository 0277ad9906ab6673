"""What the tables of README.md and docs/ are made of: rows from results/, cells as people read them, their origin."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import clusterattn as ca
from clusterattn.measure import Row, cost, read
from clusterattn.measure.words import counted

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
NOT_YET = "*Not measured yet.*\n"
FORMER = "former.json"  # in RESULTS: commits whose rows the code of today would not repeat, and why
MARK = "‡"  # beside a figure of theirs
SAME = 0.005  # of a share of multiply-adds; or a twentieth of it
TABPFN_DIM = 128  # of a head of TabPFN v1
# the pretrained tasks whose sequences all have one length: n, d, causal, query heads that share a key head
SHAPES = {
    "minilm": (512, 32, False, 1),
    "whisper": (1500, 64, False, 1),
    "smollm2-2048": (2048, 64, True, 3),
    "smollm2-4096": (4096, 64, True, 3),
    "smollm2-8192": (8192, 64, True, 3),
}


# ---- rows ----------------------------------------------------------------------------------------


def rows(*themes: str) -> list[Row]:
    """All rows of these themes, oldest first."""
    found = [row for path in sorted(RESULTS.glob("*.jsonl")) for row in read(path) if row.get("theme") in themes]
    return sorted(found, key=lambda row: str(row["environment"]["date"]))


def newest_run(theme: str) -> list[Row]:
    """The rows that share the environment of the last one."""
    found = rows(theme)
    return [row for row in found if row["environment"] == found[-1]["environment"]]


def commit_of(row: Row) -> str:
    return str(row["environment"]["commit"])


@cache
def _former(folder: Path) -> dict[str, Any]:
    path = folder / FORMER
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def former() -> dict[str, Any]:
    """Commit -> what has changed since, for those whose rows the code of today would not repeat; where that holds of
    calls of some methods alone that are not causal, {"methods": as rows name them, "then": what has changed}."""
    return _former(RESULTS)


def changed_since(row: Row) -> str | None:
    """What has, where the code of today would not repeat a row."""
    found = former().get(commit_of(row))
    if not isinstance(found, dict):
        return found
    named = row.get("method", row["theme"])  # rows of `auto` have it for a theme
    return str(found["then"]) if named in found["methods"] and not row.get("causal") else None


def is_former(row: Row) -> bool:
    return changed_since(row) is not None


def share_now(row: Row) -> float | None:
    """The share of exact attention's multiply-adds that the code counts today for a row; None where it can't tell."""
    if row["theme"] == "tabpfn" and row["method"] in ("refined", "refined/exact", "auto"):  # as it comes, train rows
        at = cost.Shape(row["rows"], row["rows"], TABPFN_DIM, TABPFN_DIM)
        return cost.share(ca.Refined(), at)
    if row.get("cost_share") is None or "settings" not in row:
        return None
    if row["theme"] == "pretrained":
        if row["task"] not in SHAPES:
            return None
        n, d, causal, group = SHAPES[row["task"]]
        at = cost.Shape(n, n, d, d, causal, group)
    else:
        at = cost.Shape(*(row[key] for key in "nmde"), row["causal"])
    method = method_of(row)
    return (
        None if method is None else cost.share(method.at(at.n, at.m, at.d, at.e, causal=at.causal, group=at.group), at)
    )


def method_of(row: Row) -> ca.Method | None:
    """By today's settings: rows of Refined without parts are from before there were any. None: a plan, no method."""
    settings = dict(row["settings"])
    if settings["method"] not in ca.METHODS:
        return None
    if settings["method"] == "refined" and "parts" not in settings:
        causal = row.get("causal", row.get("task", "").startswith("smollm2"))
        settings |= {"parts": 1, "slope": False} | ({} if causal else {"block": None})
    return ca.method(settings)


def name_of(row: Row) -> str:
    """The method by what differs from today's defaults."""
    method = method_of(row)
    return str(row["method"] if method is None else method)


def time_of(row: Row) -> str:
    """Exact attention's = 1; a dash where the row does not know exact attention's."""
    return f"{row['seconds'] / row['exact_seconds']:.2f}" if row.get("exact_seconds") else "–"


def no_times(found: Sequence[Row]) -> list[str]:
    """The sentence that says so."""
    return [] if any(row.get("exact_seconds") for row in found) else ["times were not kept in these rows"]


def out_of_date(row: Row) -> bool:
    """Does the code of today count other multiply-adds than the row says?"""
    now = share_now(row)
    if now is None:
        return False
    then = float(row.get("train_cost_share", row["cost_share"]))
    return abs(now - then) > min(SAME, then / 20)


# ---- words ---------------------------------------------------------------------------------------


def table(head: Sequence[str], body: Iterable[Sequence[str]], words: int = 1) -> str:
    """The first columns hold words, the others numbers."""
    lines = [head, [*["---"] * words, *["---:"] * (len(head) - words)], *body]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def machine(row: Row) -> str:
    around = row["environment"]
    if row.get("device", "cpu") != "cpu":
        return str(around["hardware"])
    return f"{around['hardware']}, {counted(around['threads'], 'thread')}"


def origin(found: Sequence[Row], *more: str) -> str:
    """Where the numbers come from, in one line; and, where some are of a former state of the code, what changed."""
    around = [row["environment"] for row in found]

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(each.get(key)) for each in around))

    machines = ", ".join(dict.fromkeys(map(machine, found)))
    dates = ", ".join(dict.fromkeys(str(each["date"])[:10] for each in around))
    words = [machines, f"torch {all_of('torch')}", *more, f"commit {all_of('commit')}", dates]
    old = dict.fromkeys(then for row in found if (then := changed_since(row)))
    notes = f" {MARK} {' '.join(old)}" if old else ""
    return f"\n<sub>{singular('; '.join(words))}.{notes}</sub>\n"


def singular(text: str) -> str:
    """1 book, where a row says 1 books."""
    return re.sub(r"\b1 (\w+)s\b", r"1 \1", text)


def mark(row: Row) -> str:
    return MARK if is_former(row) else ""


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def percent(share: float | None, row: Row | None = None) -> str:
    """A share of multiply-adds, marked where the code has come to count otherwise."""
    if share is None:
        return "–"
    return f"{share:.0%}" + (MARK if row is not None and out_of_date(row) else "")
