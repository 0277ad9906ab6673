"""The curves of a pretrained model: what is lost against what it costs, in multiply-adds and in time."""

from __future__ import annotations

from typing import Any

from table_words import singular

from clusterattn.measure import Row, plots

FIGURES = {  # key -> axis label
    "distance": "cosine distance of embeddings",
    "top1": "top-1 accuracy",
    "wer": "word error rate",
    "changed": "words changed against exact",
    "kl": "KL to exact, nats",
    "perplexity": "perplexity",
    "hidden": "error of the last hidden state",
}
FEW = 4  # points of a method that are labelled: the ends of its front, the default, the middle
ROOM = (34.0, 10.0)  # of a label, in points of the canvas
COSTS = {"cost_share": "multiply-adds, exact = 1", "time": "time of the whole answer, exact = 1"}


def picture(task: str, rows: list[Row], figures: list[str]) -> bytes:
    """A panel for each figure of the task (columns) and each kind of cost (rows). A line joins what no cheaper setting
    of the same method beats; hollow points are prefill alone; a ring marks Refined as it comes."""
    timed = [{**row, "time": row["seconds"] / row["exact_seconds"]} for row in rows if row.get("exact_seconds")]
    kinds = {"cost_share": rows, **({"time": timed} if len(timed) > 2 else {})}
    with plots.rules():
        drawn = plots.canvas(4.7 * len(figures) + 1.7, 3.9 * len(kinds))
        panels = drawn.subplots(len(kinds), len(figures), squeeze=False)
        for line, (cost, some) in zip(panels, kinds.items(), strict=True):
            for panel, key in zip(line, figures, strict=True):
                _panel(panel, some, cost, key)
        drawn.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right center")
        drawn.suptitle(singular(f"{task}: {rows[0]['examples']}"), size=9.5, color="#555555")
        return plots.as_png(drawn)


def _panel(panel: Any, rows: list[Row], cost: str, key: str) -> None:
    worse = -1 if key == "top1" else 1
    curves: dict[tuple[str, bool], list[Row]] = {}
    labelled: list[tuple[Row, str]] = []
    for row in rows:
        prefill = row["settings"].get("centroids_from") == "block"
        curves.setdefault((row["settings"]["method"], prefill), []).append(row)
    for (kind, prefill), mine in curves.items():
        colour, marker = plots.style_of(kind)
        label = kind + (" (prefill)" if prefill else "")
        spots = [(row[cost], row[key]) for row in mine]
        fill = "none" if prefill else "full"
        if kind == "exact":
            panel.axhline(mine[0][key], color=colour, lw=1, ls=(0, (4, 3)), zorder=1)
        panel.plot(*zip(*spots, strict=True), color=colour, marker=marker, ls="", fillstyle=fill, label=label, zorder=3)
        front = plots._front([(x, worse * y) for x, y in spots])
        panel.plot([x for x, _ in front], [worse * y for _, y in front], color=colour, lw=1.1, alpha=0.5, zorder=2)
        labelled += [(row, colour) for row in _labelled(mine, front, cost)]
        for row in mine:
            if row["method"] == "refined":  # as it comes
                panel.plot(row[cost], row[key], "o", ms=13, mfc="none", mec=colour, mew=1.6, zorder=4)
    costs = [row[cost] for row in rows]
    wide = max(costs) > 4 * min(costs)
    panel.set(xlabel=COSTS[cost], ylabel=FIGURES[key], xscale="log" if wide else "linear")
    panel.margins(x=0.12)
    values = [row[key] for row in rows]
    above = [value for value in values if value > 0]
    if key != "top1" and above and max(above) > 4 * min(above):
        if min(values) <= 0:  # exact attention's own distance from itself
            panel.set_yscale("symlog", linthresh=min(above))
            panel.set_ylim(0, 2 * max(above))
            _plain(panel.yaxis)
        else:
            panel.set_yscale("log")
            plots.plain_log_ticks(panel.yaxis)
    if wide:
        plots.plain_log_ticks(panel.xaxis)
    panel.grid(True, which="major")
    _write_labels(panel, labelled, cost, key)


def _write_labels(panel: Any, labelled: list[tuple[Row, str]], cost: str, key: str) -> None:
    """The default first; a label that would stand on another one is left out."""
    taken: list[tuple[float, float]] = []
    for row, colour in sorted(labelled, key=lambda each: each[0]["method"] != "refined"):
        x, y = panel.transData.transform((row[cost], row[key]))
        if any(abs(x - other_x) < ROOM[0] and abs(y - other_y) < ROOM[1] for other_x, other_y in taken):
            continue
        taken.append((x, y))
        place = {"xytext": (5, 4), "textcoords": "offset points", "size": 6.5, "color": colour, "zorder": 4}
        panel.annotate(_words(row), (row[cost], row[key]), **place)


def _labelled(rows: list[Row], front: list[tuple[float, float]], cost: str) -> list[Row]:
    """The default, and of the front its ends and what lies between, as many as can be read."""
    on = {spot[0] for spot in front}
    best = sorted(
        (row for row in rows if row[cost] in on and row["settings"]["method"] != "exact"), key=lambda row: row[cost]
    )
    step = max(1, -(-len(best) // (FEW - 1)))
    chosen = {id(row): row for row in (*best[::step], *best[-1:], *(row for row in rows if row["method"] == "refined"))}
    return list(chosen.values())


def _words(row: Row) -> str:
    """Sizes alone: 25/32 for 25 clusters and 32 near keys, 4×64 for four rounds of 64 seats."""
    settings = row["settings"]
    if row["method"] == "refined":
        return "default"
    if settings["method"] == "tuned":
        return f"within {settings['tolerance']}"
    if "rounds" in settings:
        return f"{settings['rounds']}×{settings.get('q_seats', '')}"
    sizes = [str(settings[name]) for name in ("clusters", "top") if settings.get(name) is not None]
    return "/".join(sizes)


def _plain(axis: Any) -> None:
    from matplotlib import ticker

    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
