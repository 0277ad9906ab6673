"""Tables of ClusterFormer's readings: what was measured of each at `small`, beside its rivals, and in a toy."""

from __future__ import annotations

import statistics
from typing import Any

import table_words as words
from readings import STEPS, TRIED
from table_words import NOT_YET, table

from clusterattn.measure import Row
from clusterattn_papers.reproduce._experiment import chosen, spread
from clusterattn_papers.reproduce._groupings import over_layers
from clusterattn_papers.reproduce._readings import READINGS
from clusterattn_papers.reproduce.page import where as made_where
from clusterattn_papers.reproduce.runner import done_rows, named

COPY, TRANSLATION, PAIRS, TEXTS = (
    "clustered-fig5",
    "clusterformer-table1",
    "clusterformer-table3",
    "clusterformer-table2",
)
RIVALS = {"transformer": "full", "reformer": "lsh", "routing": "routing"}  # and what Figure 5 calls them
LENGTHS = (31, 63, 127, 255)  # letters of the copy task, of 2 (letters + 1) tokens


def readings_table() -> str:
    found = {name: done_rows(named(name), "small", words.RESULTS) for name in (COPY, TRANSLATION, PAIRS, TEXTS)}
    copied = [row for row in found[COPY] if row["method"] != "lsh" or row["budget"] == 1]
    if not any(row["method"] in READINGS for row in copied):
        return NOT_YET
    head = (
        "reading", *(f"copy, N = {2 * (letters + 1)}" for letters in LENGTHS), "BLEU, dev", "BLEU, test",
        "prefix alone, nats", "WikiQA MAP, dev", "MAP, test", "20NEWS, test", "cosine of points", "of centroids",
    )  # fmt: skip
    body, shown = [], list[Row]()
    for label in (*RIVALS, *READINGS):
        mine = {name: [row for row in some if row["method"] == label] for name, some in found.items()}
        mine[COPY] = [row for row in copied if row["method"] == RIVALS.get(label, label)]
        for some in mine.values():
            shown += some
        wiki = {"set": "WikiQA"}
        body.append(
            (
                f"`{label}`" if label in READINGS else label,
                *(_cell(mine[COPY], "accuracy", 100, letters=letters) for letters in LENGTHS),
                _cell(mine[TRANSLATION], "dev_bleu"),
                _cell(mine[TRANSLATION], "tokenized_bleu"),
                _gap(mine[TRANSLATION]),
                _cell(mine[PAIRS], "dev", 100, **wiki),
                _cell(mine[PAIRS], "map", 100, **wiki),
                _cell(mine[TEXTS], "accuracy", 100, set="20NEWS"),
                *(over_layers(mine[TRANSLATION], name) for name in ("points", "centroids")),
            )
        )
    return table(head, body) + f"\n<sub>{made_where(shown)}.</sub>\n"


def toy_table() -> str:
    """The rows of benchmarks/readings.py: likelihoods, how far from exact attention's, and the groupings."""
    found = [row for row in words.rows("readings") if row["steps"] == STEPS]
    if not found:
        return NOT_YET
    exact = {row["seed"]: row["prefix_nll"] for row in found if row["reading"] == "transformer"}
    body = []
    for name in TRIED:
        mine = [row for row in found if row["reading"] == name]
        behind = [row["prefix_nll"] - exact[row["seed"]] for row in mine if row["seed"] in exact]
        body.append(
            (
                f"`{name}`" if name in READINGS else name,
                spread(chosen(mine, "prefix_nll"), 3),
                ", ".join(f"{each:+.3f}" for each in behind) or "…",
                _gap(mine),
                *(over_layers(mine, each) for each in ("points", "centroids")),
            )
        )
    head = (
        "reading", "nats a token", "more than the transformer, by seed", "prefix alone, nats", "cosine of points",
        "of centroids",
    )  # fmt: skip
    return table(head, body) + words.origin(found)


def _cell(some: list[Row], key: str, times: float = 1.0, **where: Any) -> str:
    return spread(chosen(some, key, **where), 1, times)


def _gap(some: list[Row]) -> str:
    """What is lost once the groups do not see the rest of the sentence."""
    gaps = [row["prefix_nll"] - row["nll"] for row in some if "prefix_nll" in row]
    return f"{statistics.fmean(gaps):+.3f}" if gaps else "–"
