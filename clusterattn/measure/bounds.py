"""What the papers prove about a call, as numbers: how far a row of weights can be from exact attention's at most."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._errors import bad_type
from .._types import Clusters


class Proposition1(NamedTuple):
    """Upper bounds of ‖A_i − A_c‖₂ for every query, (b h n): its exact weights against those of its centroid.

    0 for a query without a cluster. No two rows of weights are farther apart than √2: above that a bound says nothing.

    Attributes:
        printed: scale · |q_i − c| · ‖K‖₂, as in the paper but for the scale, which it omits
        tight: ½ · scale · |K̃ (q_i − c)|: see ``proposition1``
    """

    printed: Tensor
    tight: Tensor


def proposition1(
    q: Tensor, k: Tensor, groups: Clusters, *, key_mask: Tensor | None = None, scale: float | None = None
) -> Proposition1:
    """Proposition 1 of clustered attention (Vyas et al. 2020, eq. 7) for a call that is not causal::

        groups = ca.groups(q, k, method="clustered:clusters=25")
        bound = ca.measure.proposition1(q, k, groups)

    The paper bounds the rows' distance by that of their logits, and this by the spectral norm of K. Two steps are
    better: softmax halves distances at least (its Jacobian's norm is at most ½), and does not see what all keys have in
    common. So with K̃, the keys less their mean, half of |K̃ (q − c)| is enough, which is computed here as it is, from
    the d × d matrix K̃ᵀK̃: the distance that ``metric="keys"`` groups by. In fp64, and without an (n m) tensor.

    Args:
        q: queries (b h n d)
        k: keys (b hk m d); hk divides h
        groups: the clusters of the call
        key_mask: bool (b m), True = a real key
        scale: of the logits, 1/sqrt(d) by default
    """
    if not isinstance(groups, Clusters):
        raise bad_type("Clusters", type(groups).__name__, 'ca.groups(q, k, method="clustered")')
    q64, k64, means = q.double(), k.double(), groups.means.double()
    real = k64.new_ones(k.shape[0], k.shape[2]) if key_mask is None else key_mask.to(k64.dtype)
    real = real[:, None, :, None]
    k64 = k64 * real
    centred = (k64 - k64.sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)) * real
    shared = q.shape[1] // k.shape[1]
    gram, scatter = ((x.mT @ x).repeat_interleave(shared, 1) for x in (k64, centred))
    belongs = groups.labels >= 0
    nearest = groups.labels.clamp(min=0).unsqueeze(-1).expand_as(q64)
    apart = torch.where(belongs.unsqueeze(-1), q64 - means.gather(2, nearest), 0.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    longest = torch.linalg.eigvalsh(gram)[..., -1:].clamp(min=0).sqrt()  # (b h 1): ‖K‖₂
    along = ((apart @ scatter) * apart).sum(-1).clamp(min=0).sqrt()
    return Proposition1(abs(scale) * apart.norm(dim=-1) * longest, abs(scale) * along / 2)


def subset_error(lse: Tensor, exact_lse: Tensor) -> Tensor:
    """Σ_j |a_ij − exact_ij| of a row that attends exactly, but to some of its keys alone: 2 · (1 − their share).

    No bound but an identity, from the log-weights (b h n) of both answers, for methods that show every key at most
    once: Local, OracleTop, ClusterFormer without a bias, Smyrf with one round or dedup. It is the quantity behind
    SMYRF's Theorem 1 (with its q_C / q_D for the share), which says that the buckets that minimise it are NP-hard to
    find; there is no number in that theorem to compare a call with.

    Args:
        lse: of the method (b h n)
        exact_lse: of exact attention (b h n)
    """
    share = (lse.double() - exact_lse.double()).exp()
    return 2 * (1 - share.nan_to_num(1.0))
