"""The one call on shares of a sequence: check, learn who holds what, group, attend."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._attention import FLOATS, _call, _cast, _finish, _nothing, _pack, _wipe
from .._errors import bad_type, bad_value
from .._types import Call, Mask
from ..methods import MethodSpec
from ..methods import method as as_method
from ..methods.clustered import Clustered
from ..methods.improved import Improved
from . import _attending, _grouping
from ._collectives import Ranks, Traffic
from ._share import Share

# What all ranks must agree in, in the order in which it travels.
AGREED = (
    "method", "batch", "query heads", "key heads", "d", "e", "dtype", "scale", "seed", "return_lse",
    "which of q, k and v want gradients", "backend",
)  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: MethodSpec = "refined",
    group: dist.ProcessGroup | DeviceMesh | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    seed: int | Tensor = 0,
    backend: str = "auto",
    return_lse: bool = False,
    check: bool = True,
    traffic: Traffic | None = None,
) -> Any:
    """``ca.attention`` of a sequence whose tokens are shared out over the ranks of a process group.

    q ``(b h n d)``, k ``(b hk m d)``, v ``(b hk m e)`` are this rank's share -> out ``(b h n e)`` for its queries. Put
    side by side in the order of the ranks, the answers (and gradients) are those of one device that holds everything,
    but for the order of summation. Shares may be of any length, none included.

    Args:
        q: this rank's queries (b h n d)
        k: this rank's keys (b hk m d)
        v: this rank's values (b hk m e)
        method: Clustered, Improved or Refined: the methods whose traffic does not grow with the length
        group: a process group, or a DeviceMesh of one dimension; all ranks when left out
        key_mask: bool (b m), query_mask bool (b n), of this rank's share: True = a real token
        query_mask: bool (b n) of this rank's share, True = a real query
        causal: is refused: blocks of a causal call follow one another through the ranks, which is not done yet
        scale: as in ``ca.attention``, the same on every rank; seed a whole number
        seed: as in ``ca.attention``, the same on every rank; seed a whole number
        backend: as in ``ca.attention``, the same on every rank; seed a whole number
        return_lse: as in ``ca.attention``, the same on every rank; seed a whole number
        check: compare method, shapes and dtype over the ranks first: one more message of a few numbers
        traffic: a ``Traffic`` that counts what this rank sends, forward and backward

    Every rank of the group has to make the call, and to run backward if any does; when one dies, the others get the
    group's error after its timeout.
    """
    recipe = _recipe(method)
    if causal:
        raise bad_value(
            "causal=False: a causal call over many ranks is not made yet", "causal=True", "ca.attention on one device"
        )
    if isinstance(seed, Tensor):
        raise bad_type("seed a whole number, the same on every rank", "a tensor", "seed=int(seed)")
    ranks = Ranks(_process_group(group), traffic)
    q, k, v = _cast(q, k, v)
    call = replace(
        _call(recipe, q, k, v, key_mask, None, query_mask, False, scale, None, seed, backend, None), lse=return_lse
    )
    if check:
        _agree(_fingerprint(recipe, q, k, v, call, backend), ranks, q.device)
    lengths = q.shape[2], k.shape[2]
    q, queries_mask = _at_least_one(q, query_mask)
    k, keys_mask = _at_least_one(k, key_mask)
    v, _ = _at_least_one(v, key_mask)
    queries, keys = _shares(q, k, lengths, queries_mask, keys_mask, ranks)
    recipe = recipe.at(queries.length, keys.length, q.shape[3], v.shape[3], group=q.shape[1] // k.shape[1])
    wanted = lengths[0]
    if q.shape[0] == 0 or queries.length == 0 or keys.length == 0:
        return _pack(_nothing(q[:, :, :wanted], v), None, return_lse, False)
    call = replace(call, mask=Mask(q.shape[2], k.shape[2], keys_mask, queries.valid))
    q, k, v = _wipe(q, queries.valid), _wipe(k, keys_mask), _wipe(v, keys_mask)
    with torch.autocast(q.device.type, enabled=False):
        groups = _grouping.clusters(recipe, q, k, queries, keys, call)
        if isinstance(recipe, Improved) and recipe.parts > 1:
            parts = _grouping.parts(recipe, q.detach(), k.detach(), v.detach(), groups, queries, keys, call)
            groups = replace(groups, parts=parts)
        answer = _attending.attend(recipe, q, k, v, groups, keys.length, ranks, call)
    answer = _finish(answer, v.dtype, queries.valid)
    return _pack(replace(answer, out=answer.out[:, :, :wanted], lse=answer.lse[..., :wanted]), None, return_lse, False)


def _recipe(method: MethodSpec) -> Clustered:
    recipe = as_method(method)
    if not isinstance(recipe, Clustered):
        raise bad_value(
            "a method of the clustered family, whose traffic does not grow with the length",
            type(recipe).__name__,
            'method="refined", "improved" or "clustered"',
        )
    return recipe


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        raise bad_value("a process group", "none was made", "torch.distributed.init_process_group, or ca.attention")
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise bad_value("a DeviceMesh of one dimension", f"{group.ndim} dimensions", 'mesh["the name of one"]')
    return group.get_group()


# ---------------------------------------------------------------------------------------------------- who holds what


def _at_least_one(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A rank without tokens holds one that is not real: it has to take part in every sum."""
    if x.shape[2]:
        return x, mask
    return F.pad(x, (0, 0, 0, 1)), torch.zeros(x.shape[0], 1, dtype=torch.bool, device=x.device)


def _shares(
    q: Tensor, k: Tensor, lengths: tuple[int, int], query_mask: Tensor | None, key_mask: Tensor | None, ranks: Ranks
) -> tuple[Share, Share]:
    """The queries and the keys of this rank among all; lengths are those that came. Queries that no real key of any
    rank answers ask nothing."""
    valid = [
        torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device) if mask is None else mask
        for x, mask in ((q, query_mask), (k, key_mask))
    ]
    here = torch.cat([*(each.sum(-1) for each in valid), torch.tensor(lengths, device=q.device)])
    table, b = ranks.gather(here, "lengths").cpu(), q.shape[0]
    asked, seen = table[:, :b], table[:, b : 2 * b]
    asked = asked * (seen.sum(0) > 0)
    valid[0] = valid[0] & (seen.sum(0) > 0).to(q.device).unsqueeze(-1)
    whole = table[:, 2 * b :].sum(0).tolist()

    def share(each: Tensor, counts: Tensor, length: int) -> Share:
        before = counts[: ranks.mine].sum(0).to(q.device).unsqueeze(-1)
        return Share(each, length, before, tuple(counts.sum(0).tolist()), ranks)

    return share(valid[0], asked, whole[0]), share(valid[1], seen, whole[1])


def _fingerprint(recipe: Clustered, q: Tensor, k: Tensor, v: Tensor, call: Call, backend: str) -> list[int]:
    grads = [x.requires_grad and torch.is_grad_enabled() for x in (q, k, v)]
    method, scale = zlib.crc32(str(recipe).encode()), zlib.crc32(repr(call.scale).encode())
    assert isinstance(call.seed, int)
    return [
        method, q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], FLOATS.index(q.dtype), scale,
        call.seed % 2**62, int(call.lse), sum(int(wanted) << at for at, wanted in enumerate(grads)),
        zlib.crc32(backend.encode()),
    ]  # fmt: skip


def _agree(fingerprint: list[int], ranks: Ranks, device: torch.device) -> None:
    """Every rank sees the same table, so that all complain or none."""
    table = ranks.gather(torch.tensor(fingerprint, device=device), "agreement").tolist()
    for name, numbers in zip(AGREED, zip(*table, strict=True), strict=True):
        if len(set(numbers)) > 1:
            odd = [rank for rank, number in enumerate(numbers) if number != numbers[0]]
            raise bad_value(
                f"the same {name} on every rank",
                f"another one on rank {', '.join(map(str, odd))} than on rank 0",
                "the same call on every rank; only lengths and masks may differ",
            )
