"""The nouns that cross a doorway, and the protocol of a method.

The legend, everywhere (annotations, docs; upper case in kernels):

    b batch   h heads   n queries   m keys   d key dim   e value dim   c clusters   g buckets
    s / z query / key seats of a bucket   t kept (top) keys   p far parts   r rounds   w bits

Tensors are ``(b h n d)`` as in SDPA; positions end in ``_at``; -1 is nobody.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Union

import torch
from torch import Tensor

from ._errors import asked, bad_value, meant

if TYPE_CHECKING:
    from typing_extensions import Self

    from .ops import Ops


@dataclass(frozen=True)
class Mask:
    """May query i see key j? Asked about ORIGINAL positions: tokens are moved around, the mask never is.

    Of documents it knows nothing: rows that hold several are taken apart before a method sees them (_documents.py).

    Attributes:
        n: how many queries
        m: how many keys
        keys: (b m) bool, True = a real key
        queries: (b n) bool, True = a real query
        causal: a query sees keys up to its own position, the last query beside the last key
    """

    n: int
    m: int
    keys: Tensor | None = None
    queries: Tensor | None = None
    causal: bool = False

    @property
    def offset(self) -> int:
        """Query i stands beside key ``i + offset``: the last query beside the last key."""
        return self.m - self.n

    def key_rows(self, like: Tensor) -> Tensor:
        """(b m) bool, also when nothing is masked.

        Args:
            like: a tensor whose first dimension is the batch, on the wanted device
        """
        return self.keys if self.keys is not None else like.new_ones(like.shape[0], self.m, dtype=torch.bool)

    def query_rows(self, like: Tensor) -> Tensor:
        """(b n) bool, also when nothing is masked.

        Args:
            like: a tensor whose first dimension is the batch, on the wanted device
        """
        return self.queries if self.queries is not None else like.new_ones(like.shape[0], self.n, dtype=torch.bool)

    def blind(self, like: Tensor) -> Tensor | None:
        """(b n) bool: queries that may see no key at all; None when there can be none.

        Args:
            like: a tensor whose first dimension is the batch, on the wanted device
        """
        if self.keys is None and self.m > 0 and (not self.causal or self.offset >= 0):
            return None
        keys = self.key_rows(like)
        if not self.causal:
            return ~keys.any(-1, keepdim=True).expand(-1, self.n)
        seen = keys.cumsum(-1) > 0  # (b m): some real key at or before j
        at = torch.arange(self.n, device=like.device) + self.offset
        return ~(seen[:, at.clamp(min=0)] & (at >= 0))


@dataclass(frozen=True)
class Members:
    """The queries sorted by cluster: cluster i holds ``order[first[i] : first[i + 1]]``; nobody's come last."""

    order: Tensor  # (b*h n)
    first: Tensor  # (b*h c+2)
    place: Tensor | None = None  # (b*h n): where each stands in the order; of parts of the keys
    largest: Tensor | None = None  # (b*h c): the clusters from the largest to the smallest; of parts of the keys


@dataclass(frozen=True)
class Parts:
    """Which keys are alike to the queries' differences from their centroids, in key and in value: the far keys of every
    cluster are averaged part by part.

    Attributes:
        labels: (b hk m), -1 = a key that is not real
        count: how many parts
        members: the keys sorted by part, where kernels read them
    """

    labels: Tensor
    count: int
    members: Members | None = None


@dataclass(frozen=True)
class Clusters:
    """Who is alike. Labels carry no gradient, means do.

    ``labels[i]`` is the cluster whose centroid answers for query i, ``member_of[i]`` the cluster that query i
    helps to form. They differ only under strict causality, where a query is answered by centroids of earlier
    queries and becomes part of a centroid for later ones. Query heads that share their clusters (``share_heads``) have
    one set of counts and means, h being hk there.

    Attributes:
        labels: (b h n), -1 = no cluster
        counts: (b h c) members of each cluster
        means: (b h c d) mean of the members
        member_of: (b h n), -1 = no cluster
        members: sorted by member_of, where kernels read it
        parts: of the far keys; None: they are one
    """

    labels: Tensor
    counts: Tensor
    means: Tensor
    member_of: Tensor
    members: Members | None = None
    parts: Parts | None = None


@dataclass(frozen=True)
class Buckets:
    """Who sits together: two tables of original positions. A token may sit in several buckets or in none.

    Attributes:
        queries: (b h g s), -1 = an empty seat
        keys: (b h g z), -1 = an empty seat
        rounds: a query sits at most once in each of so many equal parts of the table; 0: in any number of seats
        copies: in each of these parts, a key sits at most once in each of so many equal parts of the buckets' seats
            (chunks that also see the chunk before: 2); 0: in any number of seats
    """

    queries: Tensor
    keys: Tensor
    rounds: int = 1
    copies: int = 0


@dataclass(frozen=True)
class Attended:
    """An average over some keys, and the log of the weight behind it. Two over disjoint keys merge exactly.

    Attributes:
        out: (b h n e)
        lse: (b h n), natural log, fp32 or better
    """

    out: Tensor
    lse: Tensor


Groups = Union[Clusters, Buckets, Parts, None]


@dataclass(frozen=True)
class Call:
    """What every method needs to know of one call besides q, k and v."""

    mask: Mask
    scale: float
    seed: int | Tensor
    ops: Ops
    fresh: bool = False  # were the groups made in this call? Then their means belong to these very queries
    soon: bool = False  # does the answer follow at once? Then it may begin meanwhile, see ops/_aside.py
    lse: bool = False  # is the log-weight wanted? Some methods save work when it is not
    state: Any = None
    keep_state: bool = False
    points: Tensor | None = None
    values: Tensor | None = None  # without gradient: keys are grouped beside their values
    parts: Parts | None = None  # of the keys, where the caller has them already
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """A recipe and its settings: the only configuration there is.

    A method says who sits together (``group``) and what they answer (``attend``). ``group`` returns the groups and the
    new state (None for methods without one); ``attend`` treats groups as given constants.
    """

    name: ClassVar[str]
    causality: ClassVar[str] = "no"  # "strict", "value" or "no"; see docs/laws.md
    self_only: ClassVar[bool] = False  # needs as many keys as queries
    shared_qk: ClassVar[bool] = False  # keys are the queries: it does not use k
    takes_bias: ClassVar[bool] = False  # it holds the weights: dense masks, additive biases and dropout are honoured
    takes_points: ClassVar[bool] = False  # groups by hidden states, where they are given
    stateful: ClassVar[bool] = False
    positional: ClassVar[bool] = False  # does it matter beside which key a query stands, also when not causal?
    groups_type: ClassVar[type | None] = None  # what group() makes: Clusters, Buckets or nothing

    def group(self, q: Tensor, k: Tensor, call: Call) -> tuple[Groups, Any]:
        """Who sits together: the groups, and the new state (None for methods without one).

        Args:
            q: queries (b h n d), padding zeroed
            k: keys (b hk m d), padding zeroed
            call: the mask, the scale, the seed, the verbs, and what else a call knows
        """
        return None, None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, groups: Groups, call: Call) -> Attended:
        """What they answer, the groups taken as constants.

        Args:
            q: queries (b h n d), padding zeroed
            k: keys (b hk m d), padding zeroed
            v: values (b hk m e), padding zeroed
            groups: what ``group`` made, for these queries or for others
            call: the mask, the scale, the seed, the verbs, and what else a call knows
        """
        raise NotImplementedError

    def through_state(self) -> list[str]:
        """What was asked for that acts through the state alone: lost where nobody takes the state. As key=value."""
        return []

    def at(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> Self:
        """This method with its open sizes filled in for a call of this shape (group: query heads of one key head).

        Args:
            n: queries
            m: keys
            d: dimension of queries and keys
            e: dimension of values
            causal: whether the call is causal
            group: query heads that share a key head
        """
        return self

    def cost(self, n: int, m: int, d: int, e: int, *, causal: bool = False, group: int = 1) -> int:
        """Multiply-adds for one query head, grouping included.

        Args:
            n: queries
            m: keys
            d: dimension of queries and keys
            e: dimension of values
            causal: whether the call is causal
            group: query heads that share a key head
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        # settings are plain values; dataclasses.asdict would copy them, which compilers cannot follow
        """The name and every setting, as plain values: for JSON."""
        return {"method": self.name, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """The method back from ``to_dict``; a setting it does not have is refused.

        Args:
            settings: its settings by name; "method" may be among them
        """
        fields = [each.name for each in dataclasses.fields(cls)]
        given = {name: value for name, value in settings.items() if name != "method"}
        strange = [name for name in given if name not in fields]
        if strange:
            near = [f"{found}=…" for name in strange if (found := meant(name, fields))]
            raise bad_value(
                f"settings of {cls.__name__}: {', '.join(sorted(fields)) or 'none'}",
                ", ".join(asked(name, fields) for name in strange),
                ", ".join(near) or "removing them",
            )
        return cls(**given)

    def __str__(self) -> str:
        """The method as one word for tables and the command line: only what differs from the defaults."""
        changed = [
            f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(changed) if changed else "")
