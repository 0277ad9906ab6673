"""Improved clustered attention (Vyas et al. 2020): exact on the keys that matter most to a cluster, its centroid's
answer on the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import bad_value, check_choice, check_whole
from .._types import Attended, Call
from ..ops._chunks import wide
from ..ops.coarse import Coarse
from ..ops.merge import NEVER
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
        self, q: Tensor, k: Tensor, v: Tensor, means: Tensor, labels: Tensor, call: Call, reach: Any
    ) -> Attended:
        said: Coarse = call.ops.coarse(
            means, k, v, call.mask, call.scale, top=self.top, tangent=self.mass == "tangent", blocks=reach
        )
        keys, values = (call.ops.take(x, said.near_at) for x in (k, v))  # (b h c t d), (b h c t e)
        bias = torch.where(said.near_at < 0, NEVER, 0.0).to(said.far.lse.dtype)
        if self.mass == "cluster":
            return self._same_share(q, labels, keys, values, bias, said, call)
        # The far part of a cluster acts as one more key: the mean far key, shifted so that its logit is the
        # tangent of the far log-sum-exp at the centroid (or, with a zero key, that log-sum-exp itself).
        far_key, level = torch.zeros_like(means), said.far.lse
        if self.mass == "tangent":
            far_key = said.mean_key.to(k.dtype)
            level = level - (wide(means) * wide(far_key)).sum(-1) * call.scale
        keys = torch.cat([keys, far_key.unsqueeze(3)], 3)
        values = torch.cat([values, said.far.out.unsqueeze(3).to(v.dtype)], 3)
        return call.ops.fine(q, labels, keys, values, torch.cat([bias, level.unsqueeze(3)], 3), call.scale)

    def _same_share(
        self, q: Tensor, labels: Tensor, keys: Tensor, values: Tensor, bias: Tensor, said: Coarse, call: Call
    ) -> Attended:
        """Far weighs against near for each query as it does for the centroid (eqs. 9-11). That share is one number for
        the cluster, and the near weights sum to one: so the far answer can be mixed into the near values beforehand."""
        empty = said.far.lse == NEVER
        ratio = torch.where(empty, NEVER, said.far.lse - torch.where(said.near_lse == NEVER, 0.0, said.near_lse))
        far = ratio.sigmoid()[..., None, None]
        near_share = 1 - (far.detach() if self.detach_mass else far)
        mixed = near_share * values + far * said.far.out.unsqueeze(3)
        near = call.ops.fine(q, labels, keys, mixed.to(values.dtype), bias, call.scale)
        return Attended(near.out, near.lse + call.ops.broadcast(F.softplus(ratio), labels))

    def cost(self, n: int, m: int, d: int, e: int) -> int:
        tangent = self.mass == "tangent"
        near = min(self.top, m) + (self.mass != "cluster")
        centroids = min(self.clusters, n) * m * (d + e + (d if tangent else 0))
        return self._grouping_cost(n, m, d) + centroids + n * near * (d + e)
