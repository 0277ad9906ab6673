"""Improved clustered attention (Vyas et al. 2020): exact on the keys that matter most to a cluster, its centroid's
answer on the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from .._errors import bad_value, check_choice, check_whole
from .._types import Attended, Call, Clusters, Parts
from ..ops.coarse import SLOPE_CLUSTERS
from . import _grouping
from .clustered import Clustered

MASSES = ("cluster", "softmax", "tangent")


@dataclass(frozen=True, kw_only=True)
class Improved(Clustered):
    """The ``top`` keys of each centroid are attended exactly by its queries; the far rest is averaged once per cluster.

    Args:
        top: near keys of a cluster, which its queries see exactly
        mass: how much the far part weighs for each query: "cluster" keeps the centroid's proportion of near to far (the
            paper's eqs. 9-11), "softmax" the centroid's log-sum-exp as it is, "tangent" its tangent at the centroid
        detach_mass: treat the near keys' share as a constant in backward, as the old code did (mass="cluster" only)
        parts: with mass="tangent": the far keys fall into so many parts, each averaged and weighed by itself
        slope: with mass="tangent": the far values move with the query to first order, by one matrix per head
    """

    name: ClassVar[str] = "improved"

    top: int = 32
    mass: str = "cluster"
    detach_mass: bool = False
    parts: int = 1
    slope: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        who = type(self).__name__
        if self.parts is not None:
            check_whole(who, parts=self.parts)
        if self.top is not None and self.top != 0:
            check_whole(who, top=self.top)
        check_choice(who, "mass", self.mass, MASSES)
        if self.detach_mass and self.mass != "cluster":
            raise bad_value('detach_mass with mass="cluster"', f"mass={self.mass!r}", "detach_mass=False")
        if self.mass != "tangent" and (self.parts != 1 or self.slope or self.top == 0):
            got = f"mass={self.mass!r}, parts={self.parts}, slope={self.slope}, top={self.top}"
            wanted = f'{who}(parts=…, slope=… or top=0) with mass="tangent"'
            raise bad_value(wanted, got, 'mass="tangent", or ca.Refined')

    @property
    def causality(self) -> str:  # type: ignore[override]
        """Parts are made of all keys, later ones among them: they serve no causal call."""
        if self.parts is not None and self.parts != 1:
            return "no"
        return "strict" if self.centroids_from == "past" else "value"

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Clusters, None]:
        if self.parts == 1 or call.parts is not None:
            clusters, _ = super().group(q, k, call)
            known = None if self.parts == 1 or call.parts is None else self._sorted(call.parts, k, call)
            return replace(clusters, parts=known), None
        if call.mask.causal:
            raise bad_value("parts=1 in a causal call", f"parts={self.parts}", "parts=1, or leaving it out")
        if call.values is None:
            raise bad_value("the values as well: keys are grouped beside them", "v=None", "ca.groups(q, k, v, ...)")
        if _grouping.from_starts(self):
            made = self._parts_aside(q, k, call.values, call)
            clusters, _ = super().group(q, k, call)
            return replace(clusters, parts=made), None
        clusters, _ = super().group(q, k, call)
        if call.soon:  # near keys are chosen meanwhile
            from ..ops._aside import part

            part(k, clusters.means, *_masks(call))
        return replace(clusters, parts=self._parts(q, k, call.values, clusters, call)), None

    def _parts_aside(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Parts:
        """Parts that need no clusters, made beside these and their near keys."""
        if not call.soon:
            return self._parts(q, k, v, None, call)
        from ..ops._aside import beside, part

        there = q, k, v, *_masks(call)
        part(*there)
        with beside(*there) as chain:
            made = self._parts(q, k, v, None, call)
            found = made.members
            chain.gives(made.labels, *([] if found is None else (found.order, found.first, found.place, found.largest)))
        return made

    def _parts(self, q: Tensor, k: Tensor, v: Tensor, clusters: Clusters | None, call: Call) -> Parts:
        rows, call = self._in_one(q.detach(), k, call)
        if clusters is not None:
            clusters = replace(clusters, labels=self._together(clusters.labels, k))
        return _grouping.parts(rows, k.detach(), v, clusters, self, call)

    def _answer(
        self, q: Tensor, k: Tensor, v: Tensor, groups: Clusters, call: Call, reach: tuple[int, int, int]
    ) -> Attended:
        answer: Attended = call.ops.near_and_far(
            q,
            groups.means,
            k,
            v,
            groups.labels,
            call.mask,
            call.scale,
            top=self.top,
            mass=self.mass,
            detach_mass=self.detach_mass,
            parts=groups.parts if call.fresh or groups.parts is None else self._sorted(groups.parts, k, call),
            shares=call.ops.shares(groups.counts, reach[0], q) if self.slope else None,
            blocks=reach,
            members=groups.members,
            counts=groups.counts if call.fresh and not call.mask.causal else None,
        )
        return answer

    def _sorted(self, parts: Parts, k: Tensor, call: Call) -> Parts:
        """Parts from a caller, who may have moved them: sorted anew where kernels read them so."""
        return replace(parts, members=call.ops.members(parts.labels, parts.count, k, parts=True))

    def _attending_cost(self, n: int, c: int, m: int, d: int, e: int) -> int:
        parts, tangent = min(self.parts, m), self.mass == "tangent"
        centroids = c * m * (d + e + (d if tangent else 0))
        keys = min(self.top, m) + (0 if self.mass == "cluster" else parts)
        few = min(c, SLOPE_CLUSTERS)
        slope = (n + m + few * parts) * d * e + few * m if self.slope else 0
        return centroids + n * keys * (d + e) + slope

    def grouping_cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        clusters = super().grouping_cost(n, m, d, e, causal=causal, group=group)
        return clusters + (_grouping.parts_cost(n, m, d, e, self, group) if 1 < self.parts < m else 0)


def _masks(call: Call) -> list[Tensor]:
    return [each for each in (call.mask.keys, call.mask.queries) if each is not None]
