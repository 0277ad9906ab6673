"""Improved clustered attention (Vyas et al. 2020): exact on the keys that matter most to a cluster, its centroid's
answer on the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .._errors import bad_value, check_choice, check_whole
from .._types import Attended, Call, Members
from .clustered import Clustered

MASSES = ("cluster", "softmax", "tangent")


@dataclass(frozen=True, kw_only=True)
class Improved(Clustered):
    """The ``top`` keys of each centroid are attended exactly by its queries; the far rest is averaged once per cluster.

    mass     how much the far part weighs for each query: "cluster" keeps the centroid's proportion of near to far
             (the paper's eqs. 9-11), "softmax" the centroid's log-sum-exp as it is, "tangent" its tangent at the
             centroid
    detach_mass  treat the near keys' share as a constant in backward, as the old code did (mass="cluster" only)
    """

    name: ClassVar[str] = "improved"

    top: int = 32
    mass: str = "cluster"
    detach_mass: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(type(self).__name__, top=self.top)
        check_choice(type(self).__name__, "mass", self.mass, MASSES)
        if self.detach_mass and self.mass != "cluster":
            raise bad_value('detach_mass with mass="cluster"', f"mass={self.mass!r}", "detach_mass=False")

    def _answer(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        means: Tensor,
        labels: Tensor,
        members: Members | None,
        call: Call,
        reach: Any,
    ) -> Attended:
        answer: Attended = call.ops.near_and_far(
            q, means, k, v, labels, call.mask, call.scale,
            top=self.top, mass=self.mass, detach_mass=self.detach_mass, blocks=reach, members=members,
        )  # fmt: skip
        return answer

    def cost(self, n: int, m: int, d: int, e: int) -> int:
        tangent = self.mass == "tangent"
        near = min(self.top, m) + (self.mass != "cluster")
        centroids = min(self.clusters, n) * m * (d + e + (d if tangent else 0))
        return self._grouping_cost(n, m, d) + centroids + n * near * (d + e)
