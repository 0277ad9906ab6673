"""One self-contained report.html with its pictures inside, and the same pictures as PNG files beside it."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._extras import need
from .._files import write_whole
from .._rows import Row, dumps
from .._types import Clusters
from . import plots
from .compare import DENSE_LIMIT, Comparison
from .words import human_bytes, human_error, human_number, human_ratio, human_seconds

if TYPE_CHECKING:
    from .approximate import Approximation

TEMPLATES = Path(__file__).parent
SHOWN_HEADS = 3
SHOWN_CLUSTERS = 14
USEFUL_ERROR = 0.3  # an answer that is farther off is no answer, however fast
FIGURE_8 = ("clustered", "improved", "refined")


def write_report(results: Mapping[str, Comparison], folder: str | Path, *, command: str = "") -> list[Path]:
    """Write report.html, the pictures and rows.jsonl; the paths, the report first.

    results   by name, which also begins the names of their pictures; a single one needs none ("")
    """
    folder = Path(folder)
    drawn = {name: draw(result) for name, result in results.items()}
    pictures = {"-".join(filter(None, (name, kind))): png for name in drawn for kind, png in drawn[name].items()}
    rows = "".join(dumps(row) + "\n" for each in results.values() for row in each.rows + each.swept)
    return [
        write_whole(folder / "report.html", render(results, drawn, command=command)),
        *(write_whole(folder / f"{name}.png", png) for name, png in pictures.items()),
        write_whole(folder / "rows.jsonl", rows),
    ]


def draw(result: Comparison) -> dict[str, bytes]:
    """The pictures that this comparison allows, by name."""
    pictures: dict[str, bytes] = {}
    if len(result.rows) > 1:
        pictures["pareto"] = plots.pareto(result.rows, result.swept)
    b, h, n, m, _, _ = result.sample.shape
    elements = range(min(b, SHOWN_HEADS))
    heads = [result.typical_head(at) for at in elements]
    places = [result.sample.place(at, head) for at, head in zip(elements, heads, strict=True)]
    middle = len(places) // 2
    if h * n * m <= DENSE_LIMIT:
        labels = ["exact", *mapped(result)]
        weights: dict[str, list[Tensor]] = {
            plots.short(label): [result.weights(label, at)[head] for at, head in zip(elements, heads, strict=True)]
            for label in labels
        }
        pictures["maps"] = plots.maps(weights, places)
        if result.sample.tokens is not None:
            corner = {label: each[middle] for label, each in weights.items()}
            pictures["words"] = plots.zoom(corner, result.sample.tokens, places[middle])
    # Improved groups as Clustered does; causal clusters belong to blocks of positions, not to one plane
    drawn = [label for label in result.clustered() if not label.startswith("improved")] or result.clustered()
    if drawn and not result.causal:
        head = heads[middle]
        found = {plots.short(label): clusters_of(result, label, middle).labels[0, head] for label in drawn[:2]}
        keys = result.sample.k[middle, head * result.sample.k.shape[1] // h]
        pictures["clusters"] = plots.clusters(result.sample.q[middle, head], keys, found, places[middle])
    return pictures


def mapped(result: Comparison) -> list[str]:
    """Whose maps stand beside exact's: those of the paper's Figure 8 and ours, else the first three."""
    others = [label for label in result.methods if label != "exact"]
    known = [label for name in FIGURE_8 for label in others if result.methods[label].name == name]
    return (known or others)[:3]


def clusters_of(result: Comparison, label: str, b: int) -> Clusters:
    found = result.groups(label, b)
    assert isinstance(found, Clusters)
    return found


def words_of_clusters(result: Comparison) -> dict[str, Any] | None:
    """The largest clusters of one head as the words in them: what the grouping took for alike."""
    labels = result.clustered()
    tokens = result.sample.tokens
    if tokens is None or not labels or result.causal:
        return None
    at = min(result.sample.shape[0], SHOWN_HEADS) // 2
    head = result.typical_head(at)
    chosen = next((label for label in labels if label.startswith("refined")), labels[-1])
    members = clusters_of(result, chosen, at).labels[0, head].tolist()
    listed: dict[int, Counter[str]] = {}
    for token, cluster in zip(tokens, members, strict=True):
        if cluster >= 0:
            listed.setdefault(cluster, Counter())[token] += 1
    largest = sorted(listed.items(), key=lambda item: -item[1].total())[:SHOWN_CLUSTERS]
    return {
        "method": chosen,
        "place": result.sample.place(at, head),
        "rows": [
            {
                "name": name,
                "size": words.total(),
                "words": words.most_common(12),
                "more": max(len(words) - 12, 0),
            }
            for name, words in largest
        ],
    }


def headline(result: Comparison) -> str:
    """What this comparison says, in one sentence that is true whatever the numbers are."""
    others = [row for row in result.rows if row["name"] not in ("exact", "oracle_top")]
    if not others:
        return "Only exact attention and its oracle were measured."
    closest = min(others, key=lambda row: float(row["error"]))
    useful = [row for row in others if row["speedup"] > 1 and row["error"] <= USEFUL_ERROR]
    length = f"at {result.sample.shape[2]} tokens"
    if not useful:
        return (
            f"Here exact attention wins: {length} nothing within an output error of {USEFUL_ERROR} is faster on this "
            f"device, and the closest, {closest['method']}, is off by {closest['error']:.3g} with "
            f"{closest['cost_share']:.1%} of the multiply-adds in {1 / closest['speedup']:.2g} times the time."
        )
    best = min(useful, key=lambda row: float(row["error"]))
    return (
        f"Here {best['method']} gains: {length} it is {best['speedup']:.2g} times as fast as exact attention, with "
        f"{best['cost_share']:.1%} of its multiply-adds, at an output error of {best['error']:.3g}."
    )


def render(results: Mapping[str, Comparison], pictures: Mapping[str, Mapping[str, bytes]], *, command: str = "") -> str:
    """The page: each comparison one after the other, under its name where there are several."""
    parts = [_part(name, result, pictures[name]) for name, result in results.items()]
    around = next(iter(results.values())).rows[0]["environment"]
    return page("report.html.jinja", {}, parts=parts, command=command, environment=around)


def _part(name: str, result: Comparison, pictures: Mapping[str, bytes]) -> dict[str, Any]:
    exact, *others = result.rows
    b, h, n, m, d, e = result.sample.shape
    return {
        "name": name,
        "headline": headline(result),
        "rows": [exact, *sorted(others, key=lambda row: float(row["error"]))],
        "worst": max(float(row["error"]) for row in result.rows) or 1.0,
        "skipped": result.skipped,
        "notes": result.notes,
        "clusters": words_of_clusters(result),
        "heads": _head_table(result),
        "source": result.sample.source,
        "shape": f"{b} × {h} heads × {n} queries × {m} keys, key dim {d}, value dim {e}",
        "length": n,
        "causal": result.causal,
        "images": embeddable(pictures),
    }


def embeddable(pictures: Mapping[str, bytes]) -> dict[str, str]:
    """As base64, which a page can hold."""
    return {name: base64.b64encode(png).decode("ascii") for name, png in pictures.items()}


def page(template: str, pictures: dict[str, bytes], *, folder: Path = TEMPLATES, **facts: Any) -> str:
    """A template with its pictures inside: one file that needs no other."""
    jinja2 = need("jinja2")
    made = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader([folder, TEMPLATES], encoding="utf-8"),
    )
    return str(
        made.get_template(template).render(
            images=embeddable(pictures),
            error=human_error,
            ratio=human_ratio,
            seconds=human_seconds,
            bytes=human_bytes,
            colour=lambda row: plots.style_of(row["name"])[0],
            **facts,
        )
    )


def _head_table(result: Comparison) -> dict[str, Any] | None:
    """Error of each head for the closest method, to show how unequal heads are."""
    b, h, *_ = result.sample.shape
    others = [row for row in result.rows if row["name"] not in ("exact", "oracle_top")]
    if b * h > 96 or not others:
        return None
    label = min(others, key=lambda row: float(row["error"]))["method"]
    errors = result.errors[label]
    name = result.sample
    return {
        "method": label,
        "columns": [name.heads[i] if name.heads else f"head {i}" for i in range(h)],
        "rows": [(name.batch[i] if name.batch else f"batch {i}", errors[i].tolist()) for i in range(b)],
    }


# ---------------------------------------------------------------------------------------------------- a whole model


def write_approximation(result: Approximation, folder: str | Path, *, command: str = "") -> list[Path]:
    """Write report.html, its pictures and rows.jsonl; the paths, the report first."""
    folder = Path(folder)
    pictures = draw_approximation(result)
    exact, *others = result.rows
    made = page(
        "approximate.html.jinja",
        pictures,
        headline=approximation_headline(result),
        about=exact,
        figures=list(exact["figures"]),
        rows=[exact, *sorted(others, key=lambda row: float(row["error"]))],
        worst=max(float(row["error"]) for row in result.rows) or 1.0,
        notes=result.notes,
        command=command,
        number=human_number,
        signed=lambda value: human_number(value, sign=True),
    )
    return [
        write_whole(folder / "report.html", made),
        *(write_whole(folder / f"{name}.png", png) for name, png in pictures.items()),
        write_whole(folder / "rows.jsonl", "".join(dumps(row) + "\n" for row in result.rows)),
    ]


def draw_approximation(result: Approximation) -> dict[str, bytes]:
    """The pictures that this result allows, by name."""
    from . import plots_model

    pictures: dict[str, bytes] = {}
    if len(result.rows) > 1:
        pictures["tradeoff"] = plots_model.tradeoff(result.rows)
    if any(result.heads.values()):
        pictures["heat"] = plots_model.heat(result.heads)
    if result.maps:
        drawn = [head.weights() for head in result.maps.values()]
        columns = [label for label in drawn[0] if all(label in each for each in drawn)][:4]
        weights = {plots.short(label): [each[label] for each in drawn] for label in columns}
        names = plots_model.tails(list(result.maps))
        places = [f"{name}, head {head.at}" for name, head in zip(names, result.maps.values(), strict=True)]
        pictures["maps"] = plots.maps(weights, places)
    return pictures


def approximation_headline(result: Approximation) -> str:
    """What this result says, in sentences that are true whatever the numbers are."""
    exact, *others = result.rows
    if not others:
        return f"With exact attention the {result.metric} is {human_number(exact['value'])}."
    closest = min(others, key=lambda row: float(row["error"]))
    sign = -1 if exact["higher_is_better"] else 1
    better = min(others, key=lambda row: sign * float(row["value"]))
    sentence = (
        f"Closest to exact attention is {closest['method']}: hidden states are off by {closest['error']:.2g} with "
        f"{closest['cost_share']:.0%} of the multiply-adds and {1 / closest['speedup']:.2g} times the time."
    )
    if exact["task"] == "hidden":
        return sentence
    return sentence + (
        f" {result.metric.capitalize()}: {human_number(exact['value'])} with exact attention, "
        f"{human_number(better['value'])} at best ({better['method']})."
    )


def approximation_cells(row: Row) -> list[str]:
    """The printed columns: the task's figures, the difference, the error of hidden states, the share, the time."""
    return [
        *(human_number(value) for value in row["figures"].values()),
        human_number(row["difference"], sign=True) if row["name"] != "exact" else "",
        human_error(row["error"]),
        f"{row['cost_share']:.1%}",
        human_ratio(1 / row["speedup"]),
    ]


def table_cells(row: Row) -> list[str]:
    """The printed columns: error, row L1, time, speed, memory, memory and multiply-adds against exact's."""
    return [
        human_error(row["error"]),
        "–" if row["row_l1"] is None else human_error(row["row_l1"]),
        human_seconds(row["seconds"]),
        human_ratio(row["speedup"]),
        human_bytes(row["memory_bytes"]),
        human_ratio(row["memory_share"]),
        f"{row['cost_share']:.1%}",
    ]
