"""Tables of whole models: what is lost, what it costs in multiply-adds, and what it costs in time."""

from __future__ import annotations

from collections.abc import Callable

from table_words import (
    MARK,
    NOT_YET,
    name_of,
    newest_run,
    no_times,
    origin,
    out_of_date,
    percent,
    rows,
    spaced,
    table,
    time_of,
)

from clusterattn.measure import Row
from clusterattn.measure.words import human_seconds

# task -> what it is, its main figure, which way is better, and the share of exact attention's cost that the bars allow
PRETRAINED = {
    "minilm": ("MiniLM-L6, 512 tokens", "distance", "cosine distance of embeddings", -1, 0.35),
    "xquad": ("MiniLM-L6, question → paragraph", "top1", "top-1 accuracy", 1, 0.35),
    "whisper": ("Whisper tiny.en's encoder, 1 500 frames", "wer", "word error rate", -1, 0.35),
    "smollm2-8192": ("SmolLM2-135M, 8 192 tokens, prefill", "kl", "KL to exact, nats", -1, 0.30),
}
FIGURES = {
    "distance": "cosine distance", "top1": "top-1", "wer": "word error rate", "changed": "words changed",
    "kl": "KL, nats", "perplexity": "perplexity", "hidden": "hidden-state error",
}  # fmt: skip
COUNTS = ("multiply-adds, of exact's", "time, exact = 1")


def pretrained_rows(task: str) -> list[Row]:
    """The newest row of each method, cheapest first."""
    newest = {row["method"]: row for row in rows("pretrained") if row["task"] == task}
    return sorted(newest.values(), key=lambda row: float(row["cost_share"]))


def pretrained_table(task: str) -> Callable[[], str]:
    def write() -> str:
        found = pretrained_rows(task)
        if not found:
            return NOT_YET
        figures = [key for key in FIGURES if key in found[0]]
        body = [
            (
                f"`{name_of(row)}`" + (" (default)" if row["method"] == "refined" else ""),
                percent(row["cost_share"], row),
                time_of(row),
                *(f"{row[key]:.4f}" for key in figures),
            )
            for row in found
        ]
        head = ("method", *COUNTS, *(FIGURES[key] for key in figures))
        examples = ", ".join(dict.fromkeys(str(row["examples"]) for row in found))
        return table(head, body) + origin(found, examples, *no_times(found))

    return write


def pretrained_summary() -> str:
    """For each task: exact attention, the default, and the best of the paper's recipe and of Refined inside the allowed
    cost."""
    body, seen = [], list[Row]()
    for task, (name, key, words, better, most) in PRETRAINED.items():
        found = pretrained_rows(task)
        if not found:
            continue

        def cell(row: Row | None, key: str = key) -> str:
            if row is None:
                return "not measured"
            took = time_of(row)
            return f"{row[key]:.4f} at {percent(row['cost_share'], row)}" + (f", {took}×" if took != "–" else "")

        def best(kind: str, found: list[Row] = found, key: str = key, better: int = better, most: float = most) -> str:
            mine = [row for row in found if row["settings"]["method"] == kind]
            if key == "kl":  # strict centroids are another question
                mine = [row for row in mine if row["settings"].get("centroids_from", "block") == "block"]
            inside = [row for row in mine if row["cost_share"] <= most] or mine[:1]
            return cell(max(inside, key=lambda row: better * float(row[key]))) if inside else "–"

        plain = {row["method"]: row for row in found}
        exact = f"{plain['exact'][key]:.4f}" if "exact" in plain else "–"
        body.append((name, words, exact, cell(plain.get("refined")), best("refined"), best("tuned"), best("improved")))
        seen += found
    if not body:
        return NOT_YET
    ours = ("`refined`, the default", "`refined`, its best inside the bar", "chosen by `tune`")
    head = ("model and task", "figure", "exact", *ours, "the paper's `improved`")
    return table(head, body, words=2) + origin(seen, *no_times(seen))


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
                f"`{row['method']}`" + (MARK if out_of_date(row) else ""),
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
        return table(head, body, words=2) + origin(found, "bf16, eager calls" if device == "cuda" else "fp32")

    return write


def sample_rows() -> list[Row]:
    """Refined as it comes on the embedded samples, the short one first."""
    found = []
    for theme in ("compare", "compare-long"):
        run = newest_run(theme) if rows(theme) else []
        mine = [row for row in run if row["budget"] == 1 and row["name"] == "refined"]
        found += sorted(mine, key=lambda row: row["method"] != "refined")[:1]
    return found
