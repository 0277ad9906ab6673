"""Tables of whole models: what is lost, what it costs in multiply-adds, and what it costs in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from table_words import (
    NOT_YET,
    mark,
    name_of,
    newest_run,
    no_times,
    origin,
    percent,
    rows,
    spaced,
    table,
    time_of,
)

from clusterattn.measure import Row
from clusterattn.measure.words import human_seconds


class Told(NamedTuple):
    """A line of the summary."""

    task: str
    name: str
    figure: str
    words: str
    better: int  # which way
    most: float  # share of exact attention's cost that the bars allow
    source: str | None = None  # centroids_from of causal rows: "block" is prefill, "past" is strict


PRETRAINED = (
    Told("minilm", "MiniLM-L6, 512 tokens", "distance", "cosine distance of embeddings", -1, 0.35),
    Told("xquad", "MiniLM-L6, question → paragraph", "top1", "top-1 accuracy", 1, 0.35),
    Told("whisper", "Whisper tiny.en's encoder, 1 500 frames", "wer", "word error rate", -1, 0.35),
    Told("smollm2-8192", "SmolLM2-135M, 8 192 tokens, prefill", "kl", "KL to exact, nats", -1, 0.30, "block"),
    Told("smollm2-8192", "SmolLM2-135M, 8 192 tokens, strict", "perplexity", "perplexity", -1, 0.30, "past"),
)
MORE = (  # other figures and lengths, for the default beside sizes given
    Told("minilm", "MiniLM-L6, 512 tokens", "hidden", "hidden-state error", -1, 1.0),
    Told("xquad", "MiniLM-L6, question → paragraph", "distance", "cosine distance of embeddings", -1, 1.0),
    Told("smollm2-4096", "SmolLM2-135M, 4 096 tokens, prefill", "kl", "KL to exact, nats", -1, 1.0, "block"),
    Told("smollm2-4096", "SmolLM2-135M, 4 096 tokens, strict", "perplexity", "perplexity", -1, 1.0, "past"),
    Told("smollm2-2048", "SmolLM2-135M, 2 048 tokens, prefill", "kl", "KL to exact, nats", -1, 1.0, "block"),
    Told("smollm2-2048", "SmolLM2-135M, 2 048 tokens, strict", "perplexity", "perplexity", -1, 1.0, "past"),
)
EQUAL = 1.03  # costs within three per cent count as equal
DEFAULTS = {"refined": "default", "refined:centroids_from=block": "default, prefill"}
FIGURES = {
    "distance": "cosine distance", "top1": "top-1", "wer": "word error rate", "changed": "words changed",
    "kl": "KL, nats", "perplexity": "perplexity", "hidden": "hidden-state error",
}  # fmt: skip
COUNTS = ("multiply-adds, of exact's", "time, exact = 1")


def pretrained_rows(task: str) -> list[list[Row]]:
    """Of each set of examples that the task was judged on, the one with the most methods first: the newest row of each
    method, cheapest first. Figures of different examples do not compare."""
    newest = {(row["examples"], row["method"]): row for row in rows("pretrained") if row["task"] == task}
    by_examples: dict[str, list[Row]] = {}
    for row in sorted(newest.values(), key=lambda row: float(row["cost_share"])):
        by_examples.setdefault(row["examples"], []).append(row)
    return sorted(by_examples.values(), key=len, reverse=True)


def pretrained_table(task: str) -> Callable[[], str]:
    def one(found: list[Row]) -> str:
        figures = [key for key in FIGURES if key in found[0]]
        body = [
            (
                f"`{name_of(row)}`" + (f" ({DEFAULTS[row['method']]})" if row["method"] in DEFAULTS else ""),
                percent(row["cost_share"], row),
                time_of(row),
                *(f"{row[key]:.4f}" for key in figures),
            )
            for row in found
        ]
        head = ("method", *COUNTS, *(FIGURES[key] for key in figures))
        means = [row for row in found if row.get("seeds", 1) > 1]
        whose = "" if len(means) == len(found) else f" ({', '.join(name_of(row) for row in means)})"
        seeds = [f"means over {means[0]['seeds']} seeds{whose}"] if means else []
        about = [str(found[0]["examples"]), *seeds, *no_times(found)]
        return table(head, body) + origin(found, *about)

    return lambda: "\n".join(map(one, pretrained_rows(task))) or NOT_YET


def pretrained_summary() -> str:
    """For each task, on its first set of examples: exact attention, the default, and the best of the paper's recipe and
    of Refined inside the allowed cost."""
    body, seen = [], list[Row]()
    for told in PRETRAINED:
        found = next(iter(pretrained_rows(told.task)), [])
        if not found:
            continue

        def cell(row: Row | None, told: Told = told) -> str:
            if row is None:
                return "not measured"
            took = time_of(row)
            said = f"{row[told.figure]:.4f} at {percent(row['cost_share'], row)}"
            return said + (f", {took}×" if took != "–" else "")

        def best(kind: str, found: list[Row] = found, told: Told = told) -> str:
            mine = [row for row in found if row["settings"]["method"] == kind]
            if told.source:
                mine = [row for row in mine if row["settings"].get("centroids_from") == told.source]
            inside = [row for row in mine if row["cost_share"] <= told.most] or mine[:1]
            return cell(max(inside, key=lambda row: told.better * float(row[told.figure]))) if inside else "–"

        plain = {row["method"]: row for row in found}
        exact = f"{plain['exact'][told.figure]:.4f}" if "exact" in plain else "–"
        ours = cell(default_of(told, found)), best("refined"), best("tuned")
        body.append((told.name, told.words, exact, *ours, best("improved")))
        seen += [row for row in found if row not in seen]
    if not body:
        return NOT_YET
    ours = ("`refined`, the default", "`refined`, its best inside the bar", "chosen by `tune`")
    head = ("model and task", "figure", "exact", *ours, "the paper's `improved`")
    return table(head, body, words=2) + origin(seen, *no_times(seen))


def default_of(told: Told, found: list[Row]) -> Row | None:
    """Refined as it comes; for prefill with centroids of the own block."""
    name = "refined:centroids_from=block" if told.source == "block" else "refined"
    return next((row for row in found if row["method"] == name), None)


def defaults_table() -> str:
    """Refined as it comes beside the best sizes of Refined that were given by hand, at no more cost: what a default may
    not lose."""
    body, seen = [], list[Row]()
    for told in (*PRETRAINED, *MORE):
        found = next(iter(pretrained_rows(told.task)), [])
        default = default_of(told, found)
        if default is None:
            continue
        given = [
            row
            for row in found
            if row["settings"]["method"] == "refined"
            and row["settings"].get("clusters") is not None
            and told.source in (None, row["settings"].get("centroids_from"))
            and row["cost_share"] <= EQUAL * default["cost_share"]
        ]
        if not given:
            continue
        rival = max(given, key=lambda row: told.better * float(row[told.figure]))
        change = told.better * (default[told.figure] / rival[told.figure] - 1)
        mine, theirs = (f"{row[told.figure]:.4f} at {percent(row['cost_share'], row)}" for row in (default, rival))
        body.append((told.name, told.words, mine, theirs, f"{change:+.1%}", f"`{name_of(rival)}`"))
        seen += [default, rival]
    if not body:
        return NOT_YET
    head = ("model and task", "figure", "`refined` as it comes", "sizes given", "better by", "which")
    return table(head, body, words=2) + origin(seen)


def tabpfn_table(device: str) -> Callable[[], str]:
    """TabPFN v1, whose sequence is the rows of a table."""

    def maybe(row: Row, key: str) -> str:
        return "–" if row.get(key) is None else f"{row[key]:.4f}"

    def write() -> str:
        mine = [row for row in rows("tabpfn") if row.get("device") == device]
        newest = {(row["rows"], row["test_rows"], row["method"]): row for row in mine}
        if not newest:
            return NOT_YET
        found = sorted(newest.values(), key=lambda row: (row["rows"], row["test_rows"], row["speedup"] or 0))
        body = [
            (
                spaced(row["rows"]) + ("" if device == "cuda" else f", {spaced(row['test_rows'])} test rows"),
                f"`{row['method']}`" + (mark(row) if row["method"] != "exact" else ""),
                maybe(row, "kl"),
                maybe(row, "accuracy"),
                "–" if row["seconds"] is None else human_seconds(row["seconds"]),
                "–" if row["seconds"] is None else f"{row['seconds'] / row['exact_seconds']:.2f}",
                f"{row['train_cost_share']:.2%}",
                f"{row['cost_share']:.2%}",
            )
            for row in found
        ]
        head = (
            "train rows",
            "attention",
            "KL",
            "accuracy",
            "whole forward",
            "time, exact = 1",
            "multiply-adds, train rows",
            "… all",
        )
        seeds = sorted({row["seeds"] for row in found if row.get("seeds", 1) > 1})
        means = [f"means over {' or '.join(map(str, seeds))} seeds where a row has them"] if seeds else []
        return table(head, body, words=2) + origin(found, "bf16, eager calls" if device == "cuda" else "fp32", *means)

    return write


def sample_rows() -> list[Row]:
    """Refined as it comes on the embedded samples, the short one first."""
    found = []
    for theme in ("compare", "compare-long"):
        run = newest_run(theme) if rows(theme) else []
        mine = [row for row in run if row["budget"] == 1 and row["name"] == "refined"]
        found += sorted(mine, key=lambda row: row["method"] != "refined")[:1]
    return found
