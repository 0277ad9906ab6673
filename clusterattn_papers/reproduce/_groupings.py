"""What rows tell of ClusterFormer's groupings: did points or centroids become one vector, are all clusters in use?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clusterattn._rows import Row
from clusterattn.methods import ClusterFormer
from clusterattn.methods import method as as_method

from ._experiment import Table


def groupings(parts: Mapping[str, Sequence[Row]]) -> list[Table]:
    """A table with a line for each label whose rows tell of groupings; none where no row does."""
    table = Table(
        "Groupings at the end of training",
        ["Model", "cosine of two points", "of two centroids", "clusters in use", "tokens in the largest, %"],
        notes=[
            "From the least to the most of all layers and seeds. A cosine near 1: they have become one vector. In use: "
            "the exponential of the entropy of the clusters' sizes."
        ],
    )
    for label, rows in parts.items():
        if any(map(_of, rows)):
            counts = [str(each.clusters) for each in map(as_method, _specs(rows)) if isinstance(each, ClusterFormer)]
            used = " of ".join([over_layers(rows, "used", 1), *counts[:1]])
            cosines = (over_layers(rows, name) for name in ("points", "centroids"))
            table.rows.append([label, *cosines, used, over_layers(rows, "largest", 0, 100)])
    return [table] if table.rows else []


def over_layers(rows: Sequence[Row], name: str, digits: int = 2, times: float = 1.0) -> str:
    """From the least of the layers, of all rows, to the most; a dash where no row tells."""
    values = [times * value for row in rows for value in _of(row).get(name, ())]
    ends = [f"{value:.{digits}f}" for value in (min(values), max(values))] if values else ["–"]
    return " to ".join(dict.fromkeys(ends))


def _of(row: Row) -> Mapping[str, Sequence[float]]:
    """Layer by layer; rows of translations have it in the last of their judgements."""
    last = [each for each in row.get("history", ()) if isinstance(each, dict)][-1:]
    found: Mapping[str, Sequence[float]] = next((each["groupings"] for each in (row, *last) if "groupings" in each), {})
    return found


def _specs(rows: Sequence[Row]) -> list[str]:
    """Of rows that name a number of clusters."""
    return [row["spec"] for row in rows if "clusters=" in str(row.get("spec"))]
