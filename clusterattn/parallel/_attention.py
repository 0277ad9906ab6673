"""The one call on shares of a sequence: check, learn who holds what, group, attend."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._attention import _finish, _nothing, _pack, _wipe
from .._checks import FLOATS, cast, checked_call
from .._errors import bad_type, bad_value
from .._types import Call, Mask
from ..methods import Auto, MethodSpec, Refined
from ..methods import method as as_method
from ..methods.clustered import Clustered
from ..methods.improved import Improved
from . import _attending, _grouping
from ._collectives import Ranks, Traffic
from ._share import Share, at_least_one

# What all ranks must agree in, in the order in which it travels.
AGREED = (
    "method",
    "batch",
    "query heads",
    "key heads",
    "d",
    "e",
    "dtype",
    "scale",
    "seed",
    "return_lse",
    "which of q, k and v want gradients",
    "backend",
    "number of streams",
)


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
    query_streams: Sequence[int] | None = None,
    key_streams: Sequence[int] | None = None,
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
        method: Clustered, Improved or Refined: the methods whose traffic does not grow with the length. "auto" is
            Refined here
        group: a process group, or a DeviceMesh of one dimension; all ranks when left out
        key_mask: bool (b m), query_mask bool (b n), of this rank's share: True = a real token
        query_mask: bool (b n) of this rank's share, True = a real query
        causal: is refused: blocks of a causal call follow one another through the ranks, which is not done yet
        scale: as in ``ca.attention``, the same on every rank; seed a whole number
        seed: as in ``ca.attention``, the same on every rank; seed a whole number
        backend: as in ``ca.attention``, the same on every rank; seed a whole number
        return_lse: as in ``ca.attention``, the same on every rank; seed a whole number
        query_streams: lengths of the streams that this share is made of, where the whole sequence is the first stream
            of every rank, then the second of every rank, ... (text and image of a joint model). None: one stream,
            shares follow one another
        key_streams: lengths of the streams that this share is made of, where the whole sequence is the first stream of
            every rank, then the second of every rank, ... (text and image of a joint model). None: one stream, shares
            follow one another
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
    q, k, v = cast(q, k, v)
    call = replace(
        checked_call(recipe, q, k, v, key_mask, None, query_mask, False, scale, None, seed, backend, None),
        lse=return_lse,
    )
    if check:
        streams = len(query_streams or (0,)) << 16 | len(key_streams or (0,))
        _agree([*_fingerprint(recipe, q, k, v, call, backend), streams], ranks, q.device)
    lengths = q.shape[2], k.shape[2]
    streams_of = _streams("query_streams", query_streams, lengths[0]), _streams("key_streams", key_streams, lengths[1])
    q, queries_mask = at_least_one(q, query_mask)
    k, keys_mask = at_least_one(k, key_mask)
    v, _ = at_least_one(v, key_mask)
    queries, keys = _shares(q, k, lengths, queries_mask, keys_mask, streams_of, ranks)
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
    if isinstance(recipe, Auto):  # exact attention would send every key past every rank
        return Refined(budget=recipe.budget)
    if not isinstance(recipe, Clustered):
        raise bad_value(
            "a method of the clustered family, whose traffic does not grow with the length",
            type(recipe).__name__,
            'method="refined", "improved" or "clustered"',
        )
    if recipe.share_heads:
        raise bad_value("share_heads=False over ranks", f"{recipe}", "share_heads=False, or ca.attention")
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


def _streams(name: str, given: Sequence[int] | None, length: int) -> list[int]:
    if given is None:
        return [max(length, 1)]  # a share without tokens holds one that is not real
    found = list(given)
    if not found or min(found) < 0 or sum(found) != length:
        raise bad_value(f"{name}: lengths that add up to the share's {length} tokens", found, f"{name}=[{length}]")
    return found if length else [1, *found[1:]]


def _shares(
    q: Tensor,
    k: Tensor,
    lengths: tuple[int, int],
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    streams: tuple[list[int], list[int]],
    ranks: Ranks,
) -> tuple[Share, Share]:
    """The queries and the keys of this rank among all; lengths are those that came. Queries that no real key of any
    rank answers ask nothing."""
    valid = [
        torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device) if mask is None else mask
        for x, mask in ((q, query_mask), (k, key_mask))
    ]
    counts = [
        torch.stack([part.sum(-1) for part in torch.split(each, sizes, -1)])  # (streams b)
        for each, sizes in zip(valid, streams, strict=True)
    ]
    here = torch.cat([*(each.flatten() for each in counts), torch.tensor(lengths, device=q.device)])
    table, b = ranks.gather(here, "lengths").cpu(), q.shape[0]
    whole = table[:, -2:].sum(0).tolist()
    cut = b * len(streams[0])
    asked = table[:, :cut].view(len(table), len(streams[0]), b)  # (ranks streams b)
    seen = table[:, cut:-2].view(len(table), len(streams[1]), b)
    any_seen = seen.sum((0, 1)) > 0
    asked, valid[0] = asked * any_seen, valid[0] & any_seen.to(q.device).unsqueeze(-1)

    def share(each: Tensor, parts: list[int], table: Tensor, length: int) -> Share:
        earlier = F.pad(table.sum(0).cumsum(0)[:-1], (0, 0, 1, 0))  # (streams b): all of the streams before
        before = (earlier + table[: ranks.mine].sum(0)).to(each.device).unsqueeze(-1)
        # padding repeats the number before it, so that numbers rise; before the first, that of no token
        each_stream = zip(torch.split(each, parts, -1), before, strict=True)
        numbers = torch.cat([start + part.cumsum(-1) - 1 for part, start in each_stream], -1)
        numbers = torch.where(each, numbers, -1).cummax(-1).values
        return Share(each, length, numbers, tuple(table.sum((0, 1)).tolist()), ranks)

    return share(valid[0], streams[0], asked, whole[0]), share(valid[1], streams[1], seen, whole[1])


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
