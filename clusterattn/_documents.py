"""Packed sequences: documents of many lengths in one row, answered in a few calls and with little padding.

Documents of equal length share a batch: every method, verb and kernel serves it as it is. So do neighbours in length,
padded to the longest of them, where that costs less than one more call. Documents that are answered exactly are never
padded. One index moves the tokens there, and back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ._errors import bad_type, bad_value
from ._types import Call, Method
from .methods import Auto, Exact
from .methods.budgets import Shape
from .methods.exact import attend_packed, packs, plain

CALL = {"cpu": 512, "cuda": 65536}  # a call costs about as much as answering for so many tokens of one head

Group = tuple[int, ...]  # documents


@dataclass(frozen=True)
class Starts:
    """Flash-attention's cu_seqlens_q and cu_seqlens_k: documents of tokens that lie one behind the other."""

    queries: Tensor  # (documents + 1,)
    keys: Tensor


@dataclass(frozen=True)
class Ids:
    """Numbers of documents: tokens of one row with one number are a document, those below 0 are nobody's."""

    queries: Tensor  # (b n)
    keys: Tensor  # (b m)


@dataclass(frozen=True, eq=False)
class Documents:
    """Whose token is whose: how many queries and keys each document has.

    Documents lie one behind the other. Where they do not, ``query_at`` and ``key_at`` (tokens,) are the positions of
    their tokens in that order.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_at: Tensor | None = None
    key_at: Tensor | None = None
    made: dict[Any, Any] = field(default_factory=dict, repr=False)  # groups and slots, for the next layer

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return list(zip(self.queries, self.keys, strict=True))

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.queries, default=0), max(self.keys, default=0)


# ---------------------------------------------------------------------------------------------------- answers


def of_rows(
    attention: Callable[..., Any], recipe: Method, q: Tensor, k: Tensor, v: Tensor, given: Any,
    query_mask: Tensor | None, causal: bool, backend: str, call: Call,
) -> Any:  # fmt: skip
    """As ``attention`` answers q (b h n d): rows that hold several documents are one row of all of them."""
    of_each = given if isinstance(given, Starts) else _ids(given, q, k)
    if torch.compiler.is_compiling():  # the lengths are known when it runs: the call is one operator, see _varlen.py
        if call.state is not None or call.points is not None or call.dropout_p > 0.0:
            raise bad_value("no state, points or dropout_p beside documents in a compiled call", "one", "eager mode")
        seed, held = (0, call.seed) if isinstance(call.seed, Tensor) else (call.seed, None)
        answer = torch.ops.clusterattn.by_document(
            q, k, v, of_each.queries, of_each.keys, query_mask, call.mask.keys, held, isinstance(of_each, Starts),
            str(recipe), causal, call.scale, seed, backend, call.lse,
        )  # fmt: skip
        return answer if call.lse else answer[0]
    (b, _, n, _), m = q.shape, k.shape[2]
    if isinstance(of_each, Starts):
        documents = from_starts(of_each, (n, m))
    else:
        documents = from_ids(of_each, query_mask, call.mask.keys)
    more = dict(scale=call.scale, seed=call.seed, backend=backend, dropout_p=call.dropout_p, state=call.state)  # noqa: C408
    q, k, v = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))
    points = None if call.points is None else call.points.flatten(0, 1)
    found = by_document(attention, recipe, q, k, v, documents, causal, call.lse, points, more)
    parts = tuple(_split(x, b) for x in found)
    return parts if call.lse else parts[0]


def by_document(
    attention: Callable[..., Any], recipe: Method, q: Tensor, k: Tensor, v: Tensor, documents: Documents, causal: bool,
    lse: bool, points: Tensor | None, more: dict[str, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    """out (h tokens e), and lse (h tokens) where it is wanted, of q (h tokens d), k and v (hk tokens d).

    points (tokens x) go where the queries go. ``more`` goes to every call of ``attention``.
    """
    aligned = causal or recipe.positional
    recipe, exact, groups = _chosen(recipe, q, k, v, documents, causal, alike(documents))
    square = not causal or all(documents.queries[i] == documents.keys[i] for i in exact)
    packed = square and not lse and packs(q, v, more["dropout_p"])
    places = places_for(documents, exact, merged(documents, groups, aligned, q), packed, q)
    parts = zip(places.batches, places.queries(q), places.keys(k), places.keys(v), strict=False)
    of_points = None if points is None else places.queries(points.unsqueeze(0))
    answers: list[tuple[Tensor, ...]] = []
    for at, (batch, its_q, its_k, its_v) in enumerate(parts):
        if batch.starts is not None:
            one = attend_packed(its_q, its_k, its_v, batch.starts, documents.longest, causal, more["scale"])
            answers.append((one,))
            continue
        many = batch.documents
        rows = _split(its_q, many), _split(its_k, many), _split(its_v, many)
        if batch.exact and square and not lse and rows[1].shape[2]:
            answer = plain(*rows, causal, more["scale"], more["dropout_p"])
        else:
            answer = attention(
                *rows, method=Exact() if batch.exact else recipe, causal=causal, return_lse=lse,
                key_mask=batch.key_mask, query_mask=batch.query_mask,
                points=None if of_points is None else _split(of_points[at], many).squeeze(1), **more,
            )  # fmt: skip
        answers.append(tuple(x.transpose(0, 1).flatten(1, 2) for x in (answer if lse else (answer,))))
    return tuple(places.join(parts) for parts in zip(*answers, strict=True))


def _chosen(
    recipe: Method, q: Tensor, k: Tensor, v: Tensor, documents: Documents, causal: bool, groups: list[Group]
) -> tuple[Method, Group, list[Group]]:
    """A method with one set of sizes, from the longest document; the documents that Exact answers instead; and the
    groups of the others."""
    for n, m in documents.sizes if recipe.self_only else ():
        if n and m and n != m:
            wanted = f"as many keys as queries in each document: {type(recipe).__name__} is self-attention only"
            raise bad_value(wanted, f"a document of {n} and {m}", "Refined, Improved, Clustered or Smyrf")
    (h, _, d), hk, e = q.shape, k.shape[0], v.shape[2]
    longest, group = documents.longest, h // hk
    if isinstance(recipe, Exact):
        return recipe, tuple(sorted(itertools.chain(*groups))), []
    if not isinstance(recipe, Auto):
        n, m = (max(length, 1) for length in longest)
        return recipe.at(n, m, d, e, causal=causal, group=group), (), groups

    sized = recipe.refined(Shape(max(longest[0], 1), max(longest[1], 1), d, e, causal, group))
    key = (recipe, q.device, q.dtype, h, d, e, causal, group)
    if key not in documents.made:
        rows, few = 0, set()
        for these in reversed(groups):
            rows += len(these) * h  # those that are at least as long would share its batch, or pay more for one
            shape = Shape(*documents.sizes[these[0]], d, e, causal, group)
            if isinstance(recipe.choose(q.device, q.dtype, rows, shape), Exact):
                few.add(these)
        documents.made[key] = tuple(sorted(itertools.chain(*few))), [these for these in groups if these not in few]
    return sized, *documents.made[key]


# ---------------------------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class Batch:
    """Documents that are answered in one call."""

    documents: int  # how many
    queries: int  # their slots, padding included
    keys: int
    exact: bool
    query_mask: Tensor | None = None  # (b n); None: there is no padding
    key_mask: Tensor | None = None
    starts: tuple[Tensor, Tensor] | None = None  # (documents + 1,) int32, where they lie one behind the other


@dataclass(frozen=True)
class Places:
    """A slot for every token: batch by batch, document by document, each with its padding behind it."""

    batches: tuple[Batch, ...]
    query_slots: Tensor | None  # (tokens,); None: tokens stay where they are
    key_slots: Tensor | None
    totals: tuple[int, int]  # how many there are for queries and for keys

    def queries(self, x: Tensor) -> tuple[Tensor, ...]:
        """(h tokens d) -> (h slots d) of every batch, 0 in the padding."""
        return _placed(x, self.query_slots, self.totals[0], [batch.queries for batch in self.batches])

    def keys(self, x: Tensor) -> tuple[Tensor, ...]:
        return _placed(x, self.key_slots, self.totals[1], [batch.keys for batch in self.batches])

    def join(self, answers: tuple[Tensor, ...]) -> Tensor:
        """What the batches answer, (h slots ...), token by token again."""
        whole = answers[0] if len(answers) == 1 else torch.cat(answers, 1)
        return whole if self.query_slots is None else whole.index_select(1, self.query_slots)


def _split(x: Tensor, rows: int) -> Tensor:
    """(h rows·n ...) -> (rows h n ...), a view."""
    return x.view(x.shape[0], rows, x.shape[1] // rows, *x.shape[2:]).transpose(0, 1)


def _placed(x: Tensor, slots: Tensor | None, total: int, sizes: list[int]) -> tuple[Tensor, ...]:
    """Cut up once: the gradient of so many slices would be as many tensors of the whole length, added up."""
    placed = x if slots is None else x.new_zeros(x.shape[0], total, x.shape[2]).index_copy(1, slots, x)
    return torch.split(placed, [*sizes, total - sum(sizes)], 1)  # the rest: keys that no query asks


def alike(documents: Documents) -> list[Group]:
    """Groups of documents of equal length, from short to long. Those without queries or without keys are in none."""
    if "alike" not in documents.made:
        groups: dict[tuple[int, int], list[int]] = {}
        for i, (n, m) in enumerate(documents.sizes):
            if n and m:
                groups.setdefault((n, m), []).append(i)
        by_size = sorted(groups, key=lambda size: (sum(size), size))
        documents.made["alike"] = [tuple(groups[size]) for size in by_size]
    found: list[Group] = documents.made["alike"]
    return found


def merged(documents: Documents, groups: list[Group], aligned: bool, q: Tensor) -> list[Group]:
    """Neighbours among the groups share a batch where padding costs less than one more call: of all ways to cut the row
    of groups, from short to long, the one that costs least.

    aligned: it matters beside which key a query stands. A padded row keeps that where all its documents have equally
    many keys more than queries.
    """
    call = CALL.get(q.device.type, CALL["cuda"]) / q.shape[0]
    key = (tuple(groups), aligned, call)
    if key not in documents.made:
        kinds: dict[int, list[Group]] = {}
        for group in groups:
            n, m = documents.sizes[group[0]]
            kinds.setdefault(m - n if aligned else 0, []).append(group)
        documents.made[key] = [each for kind in kinds.values() for each in _cut(documents, kind, call)]
    found: list[Group] = documents.made[key]
    return found


def _cut(documents: Documents, groups: list[Group], call: float) -> list[Group]:
    """A batch is priced by the longest up to its end, which in cross-attention may be longer than its own. So the last
    batch of a longer row never begins before that of a shorter one, and few ways have to be looked at."""
    sizes = (documents.sizes[group[0]] for group in groups)
    longest = itertools.accumulate(sizes, lambda before, one: (max(before[0], one[0]), max(before[1], one[1])))
    counts = list(itertools.accumulate((len(g) for g in groups), initial=0))
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first groups: the least cost, and where their last batch begins
    for end, (n, m) in enumerate(longest, 1):
        ways = range(best[-1][1], end)
        best.append(min((best[at][0] + call + (counts[end] - counts[at]) * (n + m) / 2, at) for at in ways))
    batches, end = [], len(groups)
    while end:
        begin = best[end][1]
        batches.append(tuple(i for group in groups[begin:end] for i in group))
        end = begin
    return batches


def _runs(documents: Documents, exact: Group) -> list[Group]:
    """Neighbours of equal length: they lie as a batch already."""
    runs = itertools.groupby(exact, key=lambda i: (documents.queries[i], documents.keys[i]))
    return [tuple(run) for _, run in runs]


def places_for(documents: Documents, exact: Group, groups: list[Group], packed: bool, like: Tensor) -> Places:
    """exact: documents that are not padded; packed: all of them in one batch, one behind the other. groups: those that
    share a padded batch. Made once for as long as the documents live."""
    key = (exact, tuple(groups), packed, like.device)
    if key not in documents.made:
        documents.made[key] = _places_for(documents, exact, groups, packed, like.device)
    found: Places = documents.made[key]
    return found


def _places_for(documents: Documents, exact: Group, groups: list[Group], packed: bool, device: torch.device) -> Places:
    sizes = documents.sizes
    unpadded = [exact] if packed and exact else _runs(documents, exact)
    first: dict[int, tuple[int, int]] = {}  # the first slots of a document, for queries and for keys
    n_at = m_at = 0
    batches: list[Batch] = []
    for group in (*unpadded, *groups):
        lengths = [sizes[i] for i in group]
        n, m = max(each[0] for each in lengths), max(each[1] for each in lengths)
        begin, dense = (n_at, m_at), packed and group is exact
        for i in group:
            first[i] = n_at, m_at
            n_at, m_at = (n_at + sizes[i][0], m_at + sizes[i][1]) if dense else (n_at + n, m_at + m)
        masks = (None, None) if dense else (_real(lengths, 0, device), _real(lengths, 1, device))
        starts = (_starts(lengths, 0, device), _starts(lengths, 1, device)) if dense else None
        slots = n_at - begin[0], m_at - begin[1]
        batches.append(Batch(len(group), *slots, len(batches) < len(unpadded), *masks, starts))
    begin = n_at, m_at
    for i, (n, m) in enumerate(sizes):
        if i not in first:  # a document without keys, or without queries
            first[i] = n_at, m_at
            n_at, m_at = n_at + n, m_at + m
    if n_at > begin[0] or not batches:  # they see nothing
        batches.append(Batch(1, n_at - begin[0], 0, exact=True))
    query_slots = _slots(documents.queries, [first[i][0] for i in range(len(sizes))], documents.query_at, device)
    key_slots = _slots(documents.keys, [first[i][1] for i in range(len(sizes))], documents.key_at, device)
    return Places(tuple(batches), query_slots, key_slots, (n_at, m_at))


def _starts(lengths: list[tuple[int, int]], side: int, device: torch.device) -> Tensor:
    ends = itertools.accumulate((each[side] for each in lengths), initial=0)
    return torch.tensor(list(ends), dtype=torch.int32, device=device)


def _real(lengths: list[tuple[int, int]], side: int, device: torch.device) -> Tensor | None:
    """(b n), True = a token and no padding."""
    counts = [each[side] for each in lengths]
    if min(counts) == max(counts):
        return None
    return torch.arange(max(counts), device=device) < torch.tensor(counts, device=device).unsqueeze(-1)


def _slots(lengths: Group, first: list[int], at: Tensor | None, device: torch.device) -> Tensor | None:
    """The slot of every token (tokens,), where the first slots of the documents are known; None: none has to move."""
    ends = list(itertools.accumulate(lengths, initial=0))
    shifts = [slot - end for slot, end in zip(first, ends, strict=False)]
    if at is None and not any(shifts):
        return None
    moved = torch.tensor([shifts, lengths], device=device)
    slots = moved[0].repeat_interleave(moved[1], output_size=ends[-1]) + torch.arange(ends[-1], device=device)
    return slots if at is None else torch.empty_like(slots).index_copy(0, at, slots)


# ---------------------------------------------------------------------------------------------------- reading


def from_starts(starts: Starts, tokens: tuple[int, int]) -> Documents:
    """Read them, for so many queries and keys."""
    both = (("cu_seqlens_q", starts.queries), ("cu_seqlens_k", starts.keys))
    for name, x in both:
        if not isinstance(x, Tensor):
            raise bad_type(f"{name} a tensor (documents + 1,)", type(x).__name__, f"torch.tensor({name})")
        if x.dim() != 1 or not len(x):
            raise bad_value(f"{name} of shape (documents + 1,)", tuple(x.shape), "torch.tensor([0, first, ...])")
        if x.is_floating_point() or x.dtype == torch.bool:
            raise bad_type(f"{name} of whole numbers", x.dtype, f"{name}.int()")
    if len(starts.queries) != len(starts.keys):
        got = f"{len(starts.queries) - 1} and {len(starts.keys) - 1}"
        raise bad_value("as many documents in cu_seqlens_q as in cu_seqlens_k", got, "a length of 0 where one is empty")
    found = once(_read_starts, starts.queries, starts.keys)
    for (name, _), lengths, many in zip(both, (found.queries, found.keys), tokens, strict=True):
        if sum(lengths) != many:
            raise bad_value(f"{name} to end at the {many} tokens there are", sum(lengths), "the sum of all lengths")
    return found


def _read_starts(query_starts: Tensor, key_starts: Tensor) -> Documents:
    lengths: list[Group] = []
    for name, tensor in (("cu_seqlens_q", query_starts), ("cu_seqlens_k", key_starts)):
        if name == "cu_seqlens_k" and tensor is query_starts:  # as in self-attention: the device is asked once
            return Documents(lengths[0], lengths[0])
        starts = tensor.tolist()
        if starts[0] != 0:
            raise bad_value(f"{name} to begin with 0", starts[0], f"torch.nn.functional.pad({name}, (1, 0))")
        for before, after in itertools.pairwise(starts):
            if after < before:
                raise bad_value(f"{name} that never falls", f"{before}, then {after}", "the cumulative sum of lengths")
        lengths.append(tuple(after - before for before, after in itertools.pairwise(starts)))
    return Documents(lengths[0], lengths[1])


def _ids(documents: Any, q: Tensor, k: Tensor) -> Ids:
    """From a caller, checked."""
    ids = documents if isinstance(documents, (tuple, list)) else (documents, documents)
    (b, n), m = q.shape[0::2], k.shape[2]
    if len(ids) != 2 or (ids[0] is ids[1] and n != m):
        wanted = f"documents ({b} {n}) of the queries and ({b} {m}) of the keys"
        raise bad_value(wanted, "one tensor" if len(ids) == 2 else f"{len(ids)}", "documents=(of_queries, of_keys)")
    for row, shape in zip(ids, ((b, n), (b, m)), strict=True):
        if not isinstance(row, Tensor):
            raise bad_type(f"documents a tensor {shape}", type(row).__name__, "torch.as_tensor(documents)")
        if tuple(row.shape) != shape:
            raise bad_value(f"documents of shape {shape}", tuple(row.shape), "a number for every token")
        if row.is_floating_point() or row.dtype == torch.bool:
            raise bad_type("documents of whole numbers", row.dtype, "documents.long()")
        if row.device != q.device:
            raise bad_value(f"documents on {q.device}", row.device, "documents.to(q.device)")
    return Ids(*ids)


def from_ids(ids: Ids, query_mask: Tensor | None, key_mask: Tensor | None) -> Documents:
    """Read them; masked tokens are nobody's too."""
    return once(_read_ids, ids.queries, ids.keys, query_mask, key_mask)


def _read_ids(query_ids: Tensor, key_ids: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Documents:
    rows, n = query_ids.shape
    ids = torch.cat([query_ids, key_ids], 1)
    real = ids >= 0
    for part, mask in ((real[:, :n], query_mask), (real[:, n:], key_mask)):
        if mask is not None:
            part &= mask
    names, which = torch.unique(ids, return_inverse=True)
    nobody = rows * len(names)
    owner = torch.arange(rows, device=ids.device).unsqueeze(-1) * len(names) + which
    owner = torch.where(real, owner, nobody)
    owners = owner[:, :n].flatten(), owner[:, n:].flatten()
    sizes = torch.stack([torch.bincount(each, minlength=nobody + 1) for each in owners], 1)
    in_order = torch.stack([(each.diff() >= 0).all() for each in owners])
    *of_each, of_nobody, known = torch.cat([sizes, in_order.long().unsqueeze(0)]).tolist()
    # nobody's queries see no key, nobody's keys are seen by no query
    queries, keys = zip(*(each for each in of_each if any(each)), (of_nobody[0], 0), (0, of_nobody[1]), strict=True)
    at = [None if lies else each.argsort(stable=True) for each, lies in zip(owners, known, strict=True)]
    return Documents(queries, keys, at[0], at[1])


_READ: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(read: Callable[..., Documents], first: Tensor, *others: Tensor | None) -> Documents:
    """What is read of these tensors, for as long as they live and nobody writes to them: the host waits for the device
    once for a batch, and not in every layer."""
    tensors = (first, *others)
    if any(x is not None and x.is_inference() for x in tensors):  # of these nobody knows whether they were written to
        return read(*tensors)
    versions = [x if x is None else x._version for x in tensors]
    known = _READ.get(first)  # type: ignore[no-untyped-call]
    if known is not None:
        reader, refs, seen, documents = known
        if reader is read and seen == versions and all(x is (r and r()) for x, r in zip(others, refs, strict=True)):
            return documents  # type: ignore[no-any-return]
    documents = read(*tensors)
    _READ[first] = (read, [x if x is None else TensorWeakRef(x) for x in others], versions, documents)
    return documents
