"""The one call: check once, build the mask, choose the verbs, run the recipe. Nobody behind it checks again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Union, overload

import torch
from torch import Tensor

from ._checks import cast, checked_call, filled, known_groups, known_parts, only_choice, with_extras
from ._errors import bad_type, bad_value
from ._replay import known
from ._types import Attended, Call, Groups, Method, Parts
from .methods import Auto, Exact, MethodSpec, Refined
from .methods import method as as_method
from .ops._launch import joined

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._documents import Starts
    from ._options import AttentionOptions

Answer = Union[Tensor, tuple[Any, ...]]  # out; or out with lse, state, as far as they were asked for

DEFAULT = "auto"
WORDS = {  # SDPA's, and what they are here
    "is_causal": "causal=, which puts the last query beside the last key (SDPA the first beside the first)",
    "enable_gqa": "leaving it out: fewer key heads than query heads are always welcome",
}


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_state: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_state: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_state: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Any]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_state: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Any]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = ...,
    return_state: bool = ...,
    **options: Unpack[AttentionOptions],
) -> Any: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: MethodSpec = DEFAULT,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
    documents: Tensor | tuple[Tensor, Tensor] | Starts | None = None,
    scale: float | None = None,
    generator: torch.Generator | None = None,
    seed: int | Tensor = 0,
    dropout_p: float = 0.0,
    backend: str = "auto",
    groups: Groups = None,
    state: Any = None,
    points: Tensor | None = None,
    attn_mask: Tensor | None = None,
    return_lse: bool = False,
    return_state: bool = False,
    **torchs: Any,
) -> Tensor | tuple[Any, ...]:
    """Attention by clustering, called like SDPA.

    Args:
        q: queries (b h n d)
        k: keys (b hk m d); hk divides h (grouped heads)
        v: values (b hk m e)
        method: a method, its name, or "name:key=value,...". "auto": exact attention where it is faster on this device,
            Refined elsewhere
        key_mask: bool (b m), True = a real key
        key_lengths: int (b,), instead of key_mask: the first so many keys are real, 0 to m. Checked on the CPU alone:
            elsewhere looking would wait for the device, and a length below 0 acts as 0, one beyond m as m
        query_mask: bool (b n), True = a real query; others answer 0
        causal: queries see keys up to their own position, the last query beside the last key (bottom-right)
        documents: whole numbers (b n), or a pair (b n), (b m): tokens of one row with one number are a document, which
            is grouped and answered as if it were alone; tokens below 0 are nobody's. The host reads the numbers once,
            for as long as the tensors live. ``ca.varlen_attention`` says more
        scale: of the logits, 1/sqrt(d) by default
        generator: yields the seed, one number for each call
        seed: same inputs and seed, same answer; the global RNG is never touched. A tensor that holds the seed is read
            when the kernels run: a CUDA graph then draws anew in each replay
        dropout_p: for Exact alone ("auto" is Exact then)
        backend: "auto": kernels where they can serve; "triton": kernels or an error; "reference": never kernels
        groups: from ``ca.groups``, instead of making them anew ("auto" is Refined then). Or the parts of its keys
            alone, ``ca.groups(...).parts``: keys that are grouped once serve many queries
        state: for Routing and ClusterFormer: what the last call returned with return_state=True
        points: for ClusterFormer: the hidden states (b n x) it groups by
        attn_mask: for Exact alone ("auto" is Exact then)
        return_lse: also return lse (b h n): the log of the total weight behind each answer
        return_state: also return the new state of Routing or ClusterFormer
        **torchs: SDPA's words are answered with ours, in an error

    Returns:
        out (b h n e); with return_lse or return_state a tuple of out, lse, state, as far as they were asked for
    """
    for word in torchs:
        raise bad_type("the words of ca.attention", f"{word}=", WORDS.get(word, "one of its arguments"))
    ordinary = partial(
        _attention,
        method=method,
        key_lengths=key_lengths,
        causal=causal,
        documents=documents,
        scale=scale,
        generator=generator,
        dropout_p=dropout_p,
        backend=backend,
        groups=groups,
        state=state,
        points=points,
        attn_mask=attn_mask,
        return_lse=return_lse,
        return_state=return_state,
    )
    masks = key_mask, query_mask
    if (
        torch.compiler.is_compiling()
        or not type(q) is type(k) is type(v) is Tensor
        or type(seed) is not int
        or not isinstance(method, (str, Method))
        or return_state
        or dropout_p
        or documents is not None
        or not all(x is None for x in (key_lengths, generator, groups, state, points, attn_mask))
    ):
        return ordinary(q, k, v, seed, *masks)
    kind = known(q, k, v, masks, method, causal, scale, backend, return_lse)
    if kind is None:
        return ordinary(q, k, v, seed, *masks)
    answer = kind.answer(q, k, v, masks, seed)
    if answer is None:
        answer = ordinary(q, k, v, seed, *masks)
        if not kind.learned:
            recipe = filled(as_method(method), q, k, v, causal)
            kind.learn(recipe, ordinary, q, k, masks, causal, scale, return_lse)
    return answer


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: int | Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    *,
    method: MethodSpec,
    key_lengths: Tensor | None,
    causal: bool,
    documents: Any,
    scale: float | None,
    generator: torch.Generator | None,
    dropout_p: float,
    backend: str,
    groups: Groups,
    state: Any,
    points: Tensor | None,
    attn_mask: Tensor | None,
    return_lse: bool,
    return_state: bool,
) -> Answer:
    """The call as it is made for the first time: nothing is known of it."""
    recipe = as_method(method)
    q, k, v = cast(q, k, v)
    if documents is not None:
        from ._documents import of_rows

        for word, value in (("attn_mask", attn_mask), ("groups", groups), ("return_state", return_state or None)):
            if value is not None:
                raise bad_value(f"documents without {word}=", "both", "a call for each document")
        recipe = Exact() if isinstance(recipe, Auto) and dropout_p > 0.0 else recipe
        given = key_mask, key_lengths, query_mask, False, scale, generator, seed, backend, points
        call = checked_call(recipe, q, k, v, *given)
        call = with_extras(call, recipe, q, k, None, dropout_p, state, return_lse, False)
        nothing: dict[str, Any] = dict.fromkeys(("key_lengths", "generator", "groups", "attn_mask", "documents"))
        alone = partial(_attention, return_state=False, **nothing)  # lengths seldom come again: no call is replayed
        whole: Answer = of_rows(alone, recipe, q, k, v, documents, query_mask, bool(causal), backend, call)
        return whole
    recipe = filled(recipe, q, k, v, causal, only_choice(attn_mask, dropout_p, groups))
    given = key_mask, key_lengths, query_mask, causal, scale, generator, seed, backend, points
    call = checked_call(recipe, q, k, v, *given)
    call = with_extras(call, recipe, q, k, attn_mask, dropout_p, state, return_lse, return_state)
    if q.shape[2] == 0 or k.shape[2] == 0:
        return _pack(_nothing(q, v), state, return_lse, return_state)
    wiped = _wipe(q, call.mask.queries), _wipe(k, call.mask.keys), _wipe(v, call.mask.keys)
    if q.device.type == "cpu" and not isinstance(recipe, Exact):  # (b n h d) views: moved once, not at every product
        wiped = wiped[0].contiguous(), wiped[1].contiguous(), wiped[2].contiguous()
    if isinstance(groups, Parts):
        call, groups = replace(call, parts=known_parts(recipe, groups, k)), None
    given_groups = None if groups is None else known_groups(recipe, groups, q, k)
    answered = partial(_answered, recipe, given_groups, call, return_state)
    if q.is_cuda and not torch.compiler.is_compiling() and not isinstance(recipe, Exact):
        from .ops import _ahead  # what it imports comes with kernels

        _ahead.before(answered, recipe, given_groups, call, *wiped)
    answer, made = answered(*wiped)
    return _pack(_finish(answer, v.dtype, call.mask.queries), made, return_lse, return_state)


def _answered(
    recipe: Method, given: Groups, call: Call, return_state: bool, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Attended, Any]:
    """The answer, and the new state where it was made. Groups that are given serve instead of new ones."""
    state, soon = None, given is None and not torch.compiler.is_compiling()
    try:
        with torch.autocast(q.device.type, enabled=False):
            if given is None or return_state:
                fresh, state = recipe.group(q, k, replace(call, values=v.detach(), soon=soon))
            if given is None:
                return recipe.attend(q, k, v, fresh, replace(call, fresh=True)), state
            return recipe.attend(q, k, v, given, call), state
    finally:
        if soon:
            joined()


def groups(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    method: MethodSpec = "refined",
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    generator: torch.Generator | None = None,
    seed: int | Tensor = 0,
    backend: str = "auto",
    state: Any = None,
    points: Tensor | None = None,
) -> Groups:
    """Who sits together: Clusters, Buckets, or None for Exact. The same groups that ``attention`` would make with this
    method ("auto": with Refined).

    v is wanted where keys are grouped beside their values: for ``Refined`` with parts.

    Args:
        q: queries (b h n d)
        k: keys (b hk m d); hk divides h
        v: values (b hk m e), for ``Refined`` with parts
        method: a method, its name, or "name:key=value,..."
        key_mask: bool (b m), True = a real key
        key_lengths: int (b,): the first so many keys are real, instead of key_mask
        query_mask: bool (b n), True = a real query
        causal: as in ``attention``
        scale: of the logits, 1/sqrt(d) by default
        generator: yields the seed
        seed: as in ``attention``
        backend: as in ``attention``
        state: of Routing or ClusterFormer, from an earlier call
        points: for ClusterFormer: the hidden states (b n x) it groups by
    """
    recipe = as_method(method)
    q, k, v_ = cast(q, k, k if v is None else v)
    recipe = filled(recipe, q, k, v_, causal, Refined)
    given = key_mask, key_lengths, query_mask, causal, scale, generator, seed, backend, points
    call = checked_call(recipe, q, k, v_, *given)
    call = with_extras(call, recipe, q, k, None, 0.0, state, False, False)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        values = None if v is None else _wipe(v_, call.mask.keys)
        call = replace(call, values=values)
        return recipe.group(_wipe(q, call.mask.queries), _wipe(k, call.mask.keys), call)[0]


def attention_matrix(q: Tensor, k: Tensor, v: Tensor | None = None, **options: Any) -> Tensor:
    """The dense weights (b h n m) that a method really applies, for maps and tests. Takes the options of ``attention``.

    Given the groups every method is linear in v, so the answer to v = identity is the matrix itself. Rows sum to one;
    with a slope (see Refined) single weights may be negative. v is wanted where keys are grouped beside their values,
    and for sizes that follow its width.

    Args:
        q: queries (b h n d)
        k: keys (b hk m d); hk divides h
        v: values (b hk m e), where the groups depend on them
        **options: of ``attention``
    """
    for name in ("return_lse", "return_state", "dropout_p"):
        if options.get(name):
            raise bad_value("attention_matrix without " + name, f"{name}={options[name]!r}", "ca.attention")
    if options.get("documents") is not None:
        raise bad_value("attention_matrix without documents", "documents", "a matrix for each document")
    if q.dim() != 4 or k.dim() != 4:
        return attention(q, k, k, **options)  # type: ignore[no-any-return]  # `attention` will say what is wrong with these
    recipe = as_method(options.pop("method", DEFAULT))
    recipe = filled(recipe, q, k, k if v is None else v, options.get("causal", False), only_choice(**options))
    if v is not None and options.get("groups") is None and recipe.groups_type is not None:
        only = {"attn_mask", "dropout_p", "groups"}
        asked = {name: value for name, value in options.items() if name not in only}
        options["groups"] = groups(q, k, v, method=recipe, **asked)
    identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    out: Tensor = attention(q, k, identity, method=recipe, **options)
    return out


# ---------------------------------------------------------------------------------------------------- in and out


def _wipe(x: Tensor, rows: Tensor | None) -> Tensor:
    """Zero the padded rows: whatever stood there, NaN included, reaches nobody, forward or backward."""
    return x if rows is None else torch.where(rows[:, None, :, None], x, 0.0)


def _nothing(q: Tensor, v: Tensor) -> Attended:
    """No queries or no keys: the answer is 0, still part of the graph."""
    silent = torch.where(torch.zeros_like(q[..., :1], dtype=torch.bool), q[..., :1], 0.0)
    out = (
        silent.expand(*q.shape[:3], v.shape[3])
        + v.sum((-1, -2), keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1) * 0
    )
    return Attended(
        out, torch.full(q.shape[:3], float("-inf"), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    )


def _finish(answer: Attended, dtype: torch.dtype, queries: Tensor | None) -> Attended:
    """Rows that ask or see nothing answer 0 with log-weight -inf; the answer goes back to the dtype it came in."""
    out, lse = answer.out.to(dtype), answer.lse
    if queries is None:
        return Attended(out, lse)
    return Attended(
        out.masked_fill(~queries[:, None, :, None], 0.0), lse.masked_fill(~queries.unsqueeze(1), float("-inf"))
    )


def _pack(answer: Attended, state: Any, lse: bool, keep_state: bool) -> Answer:
    returned = (answer.out, *([answer.lse] if lse else []), *([state] if keep_state else []))
    return returned if len(returned) > 1 else returned[0]
