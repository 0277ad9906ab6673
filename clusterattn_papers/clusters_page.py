"""The clusters of a model as a page: a table of layers, the answers, pictures, and what single clusters hold."""

from __future__ import annotations

from pathlib import Path

from clusterattn._files import write_whole
from clusterattn._rows import dumps
from clusterattn.measure.plots_model import tails
from clusterattn.measure.words import counted

from . import plots_clusters
from .clusters import FIGURES, ClusterReport, contents, typical

MOST_WORDS = 14  # of a cluster, in its line
SHARES = ("largest", "near")  # figures that are shares of something


def by_layer(report: ClusterReport) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: means over the heads of a layer."""
    titles = ["layer", "next layer", "other heads", *(FIGURES[name] for name in report.heads)]
    within, after = report.within(), report.across() if len(report.layers) > 1 else None
    rows = []
    for at, name in enumerate(tails(report.layers)):
        following = f"{after[at].mean():.2f}" if after is not None and at < len(after) else "–"
        cells = [
            f"{float(values[at].mean()):{'.0%' if key in SHARES else '.2f' if key == 'again' else '.1f'}}"
            for key, values in report.heads.items()
        ]
        beside = f"{within[at]:.2f}" if within[at] == within[at] else "–"
        rows.append([name, following, beside, *cells])
    return titles, rows


LEGEND = """\
*next layer*, *other heads*, *another draw*: adjusted Rand index (0 chance, 1 the same clusters) with the head of the
next layer that fits best, with the other heads of the layer, with the same head grouped from another draw. *clusters*:
in use. *largest*: its share of the tokens. *same token*, *same kind*, *same best key*: how many times as often two
queries of a cluster share it as any two queries. *distance*: of two tokens of a cluster, as a share of that of any
two."""


def write_clusters(report: ClusterReport, folder: Path, *, command: str = "") -> list[Path]:
    """clusters.md, its pictures and rows.jsonl; the paths, the page first."""
    pictures = {
        "agreement": plots_clusters.agreement(report),
        "holds": plots_clusters.holds(report),
        "tokens": plots_clusters.tokens(report),
    }
    kept = {name: png for name, png in pictures.items() if png is not None}
    return [
        write_whole(folder / "clusters.md", _page(report, list(kept), command)),
        *(write_whole(folder / f"{name}.png", png) for name, png in kept.items()),
        write_whole(folder / "rows.jsonl", "".join(dumps(row) + "\n" for row in report.rows())),
    ]


def _page(report: ClusterReport, pictures: list[str], command: str) -> str:
    about = report.about
    titles, rows = by_layer(report)
    lines = [
        f"# Clusters of {about['model']}",
        "",
        f"`{about['method']}`, {counted(about['sequences'], 'sequence')}, {about['tokens']} tokens. The model runs "
        "with exact attention; the queries of each head are grouped beside it." + (f" `{command}`" if command else ""),
        "",
        *(f"- {line}" for line in report.findings()),
        "",
        f"| {' | '.join(titles)} |",
        f"|---|{'---:|' * (len(titles) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        LEGEND,
        *(f"\n{name} has other positions than the first layer and is not shown." for name in report.left_out),
        *(f"\n![{name}]({name}.png)" for name in pictures),
    ]
    if report.passage.words:
        layer, head = typical(report)
        lines += ["", f"## {tails(report.layers)[layer]}, head {head}: the clusters of the first sequence", ""]
        for size, words in contents(report.passage, layer, head):
            more = f" … ({len(words)} different)" if len(words) > MOST_WORDS else ""
            lines.append(f"- {counted(size, 'token')}: {' · '.join(f'`{word}`' for word in words[:MOST_WORDS])}{more}")
    return "\n".join(lines) + "\n"
