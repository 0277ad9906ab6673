"""ClusterFormer as its paper can be read. Every reading has a label, and under it rows of its own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from clusterattn._rows import Row
from clusterattn.methods import ClusterFormer

from ._experiment import chosen

PAPERS = "clusterformer"  # the paper's own name for what it shows; and the label of this project's first reading
# All that a reading depends on is written out, so that rows stay true whatever becomes of the defaults.
_FIRST: dict[str, Any] = {
    "scope": "shared", "similarity": "cosine", "sharpness": 1.0, "assign": "share", "ties": "forward",
    "compare": "updated", "spread": False, "trains": "all", "affinity": 0.0, "straight": False, "mu": 0.1, "nu": 0.1,
    "balance": 0.0, "fade": 0, "pass_on": True,
}  # fmt: skip
_HEAD = _FIRST | {"scope": "head", "trains": "centroids"}
READINGS: dict[str, dict[str, Any]] = {
    PAPERS: _FIRST,
    "clusterformer-head": _HEAD,
    "clusterformer-off": _HEAD | {"mu": 0.0, "nu": 0.0},
    "clusterformer-spread": _HEAD | {"spread": True},
    "clusterformer-task": _HEAD | {"affinity": 8.0, "sharpness": 5.0},
}
DEFAULT = "clusterformer-head"  # what `ClusterFormer()` is
CHOSEN = "clusterformer-spread"  # the best on the toy copy task of those that take nothing from the task
TASK = "clusterformer-task"  # the best of all there, and not in the paper: shown beside it
# Came after the tables, and is shown where the copy task is trained longer: blocks look back alone, so tokens of one
# cluster stand the other way round in every other one, and clusters are kept as even as the blocks that cut them.
TURNS = "clusterformer-turns"
LATER: dict[str, dict[str, Any]] = {TURNS: READINGS[TASK] | {"ties": "turns", "balance": 0.1}}
NEW = tuple(label for label in READINGS if label != PAPERS)
GROUPED = {  # what tells them apart
    PAPERS: "one grouping for all heads",
    "clusterformer-head": "a grouping for each head",
    "clusterformer-off": "a grouping for each head, without L1 and L2",
    "clusterformer-spread": "a grouping for each head, points spread out",
    "clusterformer-task": "a grouping for each head that the task trains too (ours)",
}
SAYS = {label: f"ClusterFormer, {words}" for label, words in GROUPED.items()}
READINGS_NOTE = (
    "ClusterFormer is read in several ways, each with rows of its own: one grouping for all heads, with losses whose "
    "gradient reaches all of the model (the first reading, which collapses); one for each head, with losses that train "
    "the centroids alone (the library's default); the same without losses; the same with losses and points that have "
    "mean 0 and variance 1 over the tokens (the best of these on a smaller copy task than Figure 5's); and one for "
    "each head that the task trains too, by an affinity of 8 on the logits, which is not in the paper. Cosine "
    "similarities; the losses' weights, of which the paper says nothing, are mu = nu = 0.1."
)


def reading(label: str, clusters: int | None = None) -> str:
    """The method of a label, as text."""
    return str(ClusterFormer(clusters=clusters, **(READINGS | LATER)[label]))


def in_paper(label: str) -> str:
    """The row of the paper's table that a label's rows stand beside."""
    return PAPERS if label in READINGS else label


def best_on_dev(rows: Sequence[Row], dev: str, **where: Any) -> str | None:
    """The label of the reading whose mean on dev is best; None where there is nothing to choose from."""
    found = {label: chosen(rows, dev, method=label, **where) for label in READINGS}
    means = {label: statistics.fmean(each) for label, each in found.items() if each}
    return max(means, key=means.__getitem__) if len(means) > 1 else None
