"""The one call: check once, build the mask, choose the verbs, run the recipe. Nobody behind it checks again."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ._documents import Starts, of_rows
from ._errors import bad_type, bad_value
from ._replay import known
from ._types import Attended, Buckets, Call, Clusters, Groups, Mask, Method, Parts
from .methods import Auto, Exact, MethodSpec, Refined
from .methods import method as as_method
from .methods.budgets import Shape
from .ops import choose

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import AttentionOptions

DEFAULT = "auto"
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WORDS = {  # SDPA's, and what they are here
    "is_causal": "causal=, which puts the last query beside the last key (SDPA the first beside the first)",
    "enable_gqa": "leaving it out: fewer key heads than query heads are always welcome",
}


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., return_state: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], return_state: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., return_state: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Any]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], return_state: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Any]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., return_state: bool = ...,
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
) -> Any:
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
        _attention, method=method, key_mask=key_mask, key_lengths=key_lengths, query_mask=query_mask, causal=causal,
        documents=documents, scale=scale, generator=generator, dropout_p=dropout_p, backend=backend, groups=groups,
        state=state, points=points, attn_mask=attn_mask, return_lse=return_lse, return_state=return_state,
    )  # fmt: skip
    if (
        torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is Tensor or type(seed) is not int
        or not isinstance(method, (str, Method)) or return_state or dropout_p or documents is not None
        or not all(x is None for x in (key_mask, key_lengths, query_mask, generator, groups, state, points, attn_mask))
    ):  # fmt: skip
        return ordinary(q, k, v, seed)
    kind = known(q, k, v, method, causal, scale, backend, return_lse)
    if kind is None:
        return ordinary(q, k, v, seed)
    answer = kind.answer(q, k, v, seed)
    if answer is None:
        answer = ordinary(q, k, v, seed)
        if not kind.learned:
            recipe = _filled(as_method(method), q, k, v, causal)
            kind.learn(recipe, ordinary, q, k, causal, scale, return_lse)
    return answer


def _attention(
    q: Tensor, k: Tensor, v: Tensor, seed: int | Tensor, *, method: MethodSpec, key_mask: Tensor | None,
    key_lengths: Tensor | None, query_mask: Tensor | None, causal: bool, documents: Any, scale: float | None,
    generator: torch.Generator | None, dropout_p: float, backend: str, groups: Groups, state: Any,
    points: Tensor | None, attn_mask: Tensor | None, return_lse: bool, return_state: bool,
) -> Any:  # fmt: skip
    """The call as it is made for the first time: nothing is known of it."""
    recipe = as_method(method)
    q, k, v = _cast(q, k, v)
    if documents is not None:
        for word, value in (("attn_mask", attn_mask), ("groups", groups), ("return_state", return_state or None)):
            if value is not None:
                raise bad_value(f"documents without {word}=", "both", "a call for each document")
        recipe = Exact() if isinstance(recipe, Auto) and dropout_p > 0.0 else recipe
        call = _call(recipe, q, k, v, key_mask, key_lengths, query_mask, False, scale, generator, seed, backend, points)
        call = _with_extras(call, recipe, q, k, None, dropout_p, state, return_lse, False)
        nothing: dict[str, Any] = dict.fromkeys(("key_lengths", "generator", "groups", "attn_mask", "documents"))
        alone = partial(_attention, return_state=False, **nothing)  # lengths seldom come again: no call is replayed
        return of_rows(alone, recipe, q, k, v, documents, query_mask, bool(causal), backend, call)
    recipe = _filled(recipe, q, k, v, causal, _only(attn_mask, dropout_p, groups))
    call = _call(recipe, q, k, v, key_mask, key_lengths, query_mask, causal, scale, generator, seed, backend, points)
    call = _with_extras(call, recipe, q, k, attn_mask, dropout_p, state, return_lse, return_state)
    if q.shape[2] == 0 or k.shape[2] == 0:
        return _pack(_nothing(q, v), state, return_lse, return_state)
    wiped = _wipe(q, call.mask.queries), _wipe(k, call.mask.keys), _wipe(v, call.mask.keys)
    if q.device.type == "cpu" and not isinstance(recipe, Exact):  # (b n h d) views: moved once, not at every product
        wiped = wiped[0].contiguous(), wiped[1].contiguous(), wiped[2].contiguous()
    if isinstance(groups, Parts):
        call, groups = replace(call, parts=_known_parts(recipe, groups, k)), None
    with torch.autocast(q.device.type, enabled=False):
        if groups is None or return_state:
            fresh, state = recipe.group(wiped[0], wiped[1], replace(call, values=wiped[2].detach()))
        if groups is None:
            answer = recipe.attend(*wiped, fresh, replace(call, fresh=True))
        else:
            answer = recipe.attend(*wiped, _known(recipe, groups, q, k), call)
    return _pack(_finish(answer, v.dtype, call.mask.queries), state, return_lse, return_state)


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
    q, k, v_ = _cast(q, k, k if v is None else v)
    recipe = _filled(recipe, q, k, v_, causal, Refined)
    call = _call(recipe, q, k, v_, key_mask, key_lengths, query_mask, causal, scale, generator, seed, backend, points)
    call = _with_extras(call, recipe, q, k, None, 0.0, state, False, False)
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
    recipe = _filled(recipe, q, k, k if v is None else v, options.get("causal", False), _only(**options))
    if v is not None and options.get("groups") is None and recipe.groups_type is not None:
        only = {"attn_mask", "dropout_p", "groups"}
        asked = {name: value for name, value in options.items() if name not in only}
        options["groups"] = groups(q, k, v, method=recipe, **asked)
    identity = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    out: Tensor = attention(q, k, identity, method=recipe, **options)
    return out


# ---------------------------------------------------------------------------------------------------- checks


def _cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Autocast as for SDPA: everything in its dtype. Then one dtype, one device, four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise bad_type(f"{name} a torch.Tensor", type(x).__name__, f"torch.as_tensor({name})")
        if x.is_nested or x.layout != torch.strided:
            kind = "a nested tensor" if x.is_nested else f"one of layout {x.layout}"
            advice = "torch.nested.to_padded_tensor(x, 0.0) with key_lengths=" if x.is_nested else f"{name}.to_dense()"
            advice = "ca.varlen_attention on x.values(), with x.offsets()" if x.layout == torch.jagged else advice
            raise bad_type(f"{name} a dense tensor", kind, advice)
        if x.is_meta and not torch.compiler.is_compiling():
            advice = "a real device, torch.export, or a FakeTensorMode for shapes alone"
            raise bad_type(f"{name} with numbers in it", "a tensor on the device meta", advice)
        if x.dim() != 4:
            shape = "(b h n d)" if name == "q" else f"(b hk m {'d' if name == 'k' else 'e'})"
            raise bad_value(
                f"{name} of shape {shape}",
                tuple(x.shape),
                f"{name}.unsqueeze(0) for one sequence, or splitting its heads",
            )
        if x.dtype not in FLOATS:
            raise bad_type(f"{name} in fp32, fp64, bf16 or fp16", x.dtype, f"{name}.float()")
    kind = q.device.type
    if torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise bad_type("q, k and v of one dtype", f"{q.dtype}, {k.dtype}, {v.dtype}", "x.to(q.dtype), or autocast")
    if not q.device == k.device == v.device:
        raise bad_value("q, k and v on one device", f"{q.device}, {k.device}, {v.device}", "x.to(q.device)")
    return q, k, v


def _only(
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, groups: Groups = None, **_: Any
) -> type[Method] | None:
    """What a call asks for that leaves Auto no choice."""
    if attn_mask is not None or dropout_p > 0.0:
        return Exact
    return None if groups is None else Refined


def _filled(recipe: Method, q: Tensor, k: Tensor, v: Tensor, causal: bool, only: type[Method] | None = None) -> Method:
    """The recipe with what it leaves open chosen for this call: Auto's method (``only`` what the call asks for), and
    sizes. Shapes that do not agree are refused later."""
    (b, h, n, d), (hk, m), e = q.shape, k.shape[1:3], v.shape[3]
    causal, group = bool(causal), h // max(hk, 1)
    if isinstance(recipe, Auto):
        if only is Exact:
            return Exact()
        shape = Shape(n, m, d, e, causal, group)
        return recipe.refined(shape) if only is Refined else recipe.choose(q.device, q.dtype, b * h, shape)
    return recipe.at(n, m, d, e, causal=causal, group=group)


def _call(
    recipe: Method, q: Tensor, k: Tensor, v: Tensor,
    key_mask: Tensor | None, key_lengths: Tensor | None, query_mask: Tensor | None, causal: bool,
    scale: float | None, generator: torch.Generator | None, seed: int | Tensor, backend: str, points: Tensor | None,
) -> Call:  # fmt: skip
    (b, h, n, d), (bk, hk, m, dk), (bv, hv, mv, _) = q.shape, k.shape, v.shape
    if not (b == bk == bv and hk == hv and m == mv and d == dk):
        raise bad_value(
            "q (b h n d), k (b hk m d), v (b hk m e) that agree in b, hk, m and d",
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            "checking the order of dimensions",
        )
    if hk == 0 or h % hk:
        raise bad_value(
            "a number of key heads that divides the query heads",
            f"{h} query heads over {hk} key heads",
            "repeating k and v",
        )
    if d == 0:
        raise bad_value("a head dimension d of at least 1", tuple(q.shape), "checking the order of dimensions")
    if recipe.self_only and n != m:
        raise bad_value(
            f"as many keys as queries: {type(recipe).__name__} is self-attention only",
            f"n={n}, m={m}",
            "Refined, Improved, Clustered or Smyrf for cross-attention",
        )
    if key_lengths is not None:
        if key_mask is not None:
            raise bad_value("key_mask or key_lengths", "both", "one of them")
        _check_row("key_lengths", key_lengths, (b,), q.device, whole=True)
        _check_lengths(key_lengths, m)
        key_mask = torch.arange(m, device=q.device) < key_lengths.unsqueeze(-1)
    if key_mask is not None:
        _check_row("key_mask", key_mask, (b, m), q.device)
    if query_mask is not None:
        _check_row("query_mask", query_mask, (b, n), q.device)
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise bad_type("generator a torch.Generator", type(generator).__name__, "seed= for a number")
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    _check_seed(seed, q.device)
    if scale is not None and not abs(scale) < math.inf:  # NaN is not, either
        raise bad_value("scale a finite number", f"scale={scale}", "leaving it out: 1/sqrt(d)")
    if points is not None and (points.dim() != 3 or tuple(points.shape[:2]) != (b, n)):
        raise bad_value(f"points ({b} {n} x)", tuple(points.shape), "the hidden states before the heads are split")
    mask = Mask(n, m, key_mask, query_mask, bool(causal))
    blind = mask.blind(q) if m else None
    if blind is not None:  # who sees nothing asks nothing: it has no say in the groups and gets no gradient
        mask = Mask(n, m, key_mask, ~blind if query_mask is None else query_mask & ~blind, bool(causal))
    return Call(mask, d**-0.5 if scale is None else scale, seed, choose(backend), points=points)


def _check_seed(seed: object, device: torch.device) -> None:
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype != torch.int64 or seed.device != device:
            got = f"{seed.dtype} {tuple(seed.shape)} on {seed.device}"
            wanted = f"seed a number, or one in an int64 tensor () on {device}"
            raise bad_value(wanted, got, "torch.tensor(0, device=q.device)")
    elif not isinstance(seed, (int, torch.SymInt)) or isinstance(seed, bool) or seed < 0:
        raise bad_value("seed a whole number >= 0", repr(seed), "seed=0")


def _check_lengths(lengths: Tensor, m: int) -> None:
    """From 0 to m, where that can be seen at once: a GPU, or a graph in the making, is not waited for."""
    if lengths.device.type != "cpu" or type(lengths) is not Tensor or torch.compiler.is_compiling() or not len(lengths):
        return
    least, most = (int(x) for x in lengths.aminmax())
    if least < 0 or most > m:
        wanted = f"key_lengths from 0 to the {m} keys there are"
        raise bad_value(wanted, f"{least if least < 0 else most}", f"key_lengths.clamp(0, {m}), or the right ones")


def _check_row(name: str, row: Tensor, shape: tuple[int, ...], device: torch.device, whole: bool = False) -> None:
    if not isinstance(row, Tensor):
        raise bad_type(f"{name} a tensor of shape {shape}", type(row).__name__, f"torch.as_tensor({name})")
    if tuple(row.shape) != shape:
        advice = "method=ca.Exact() with attn_mask= for a dense mask" if row.dim() > 2 else f"{name} of shape {shape}"
        raise bad_value(f"{name} of shape {shape}", tuple(row.shape), advice)
    if whole:
        if row.is_floating_point() or row.dtype == torch.bool:
            raise bad_type(f"{name} of whole numbers", row.dtype, f"{name}.long()")
    elif row.dtype != torch.bool:
        raise bad_type(
            f"{name} bool, True = kept (additive biases need method=ca.Exact() and attn_mask=)",
            row.dtype,
            f"{name}.bool()",
        )
    if row.device != device:
        raise bad_value(f"{name} on {device}", row.device, f"{name}.to(q.device)")


def _with_extras(
    call: Call,
    recipe: Method,
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    state: Any,
    lse: bool,
    keep_state: bool,
) -> Call:
    exact = recipe.name == "exact"
    if attn_mask is not None and not exact:
        raise bad_value(
            "no attn_mask: clustering cannot honour a dense mask or an additive bias",
            f"attn_mask {tuple(attn_mask.shape)}",
            "method=ca.Exact(), or key_mask / causal where they say the same",
        )
    if not 0.0 <= dropout_p < 1.0:
        raise bad_value("dropout_p in [0, 1)", dropout_p, "dropout_p=0.0")
    if dropout_p > 0.0 and not exact:
        raise bad_value(
            f"dropout_p=0.0: {type(recipe).__name__} never holds the weights that dropout would thin out",
            dropout_p,
            "dropout on the output, or method=ca.Exact()",
        )
    if (state is not None or keep_state) and not recipe.stateful:
        raise bad_value(
            "a method with state (Routing, ClusterFormer)", type(recipe).__name__, "leaving out state and return_state"
        )
    if call.points is not None and recipe.name != "clusterformer":
        raise bad_value("points only with method=ClusterFormer", type(recipe).__name__, "leaving out points")
    if attn_mask is not None:
        try:
            torch.broadcast_shapes(attn_mask.shape, (*q.shape[:3], k.shape[2]))  # type: ignore[no-untyped-call]
        except RuntimeError:
            shape = (*q.shape[:3], k.shape[2])
            raise bad_value(f"attn_mask that broadcasts to {shape}", tuple(attn_mask.shape), "(b 1 n m)") from None
    return replace(call, lse=lse, state=state, keep_state=keep_state, attn_mask=attn_mask, dropout_p=dropout_p)


def _known(recipe: Method, groups: Groups, q: Tensor, k: Tensor) -> Groups:
    """Groups handed in by the caller must be of this method's kind and of this call's shape."""
    wanted = recipe.groups_type
    if wanted is None or not isinstance(groups, wanted):
        name = "no groups" if wanted is None else wanted.__name__
        raise bad_type(
            f"{name} for {type(recipe).__name__}",
            type(groups).__name__,
            "ca.groups(q, k, method=...) with the same method",
        )
    assert isinstance(groups, (Clusters, Buckets))
    shape = groups.labels.shape if isinstance(groups, Clusters) else (*groups.queries.shape[:2], q.shape[2])
    if tuple(shape) != tuple(q.shape[:3]):
        raise bad_value(f"groups made for queries {tuple(q.shape[:3])}", tuple(shape), "ca.groups on these q and k")
    return groups


def _known_parts(recipe: Method, parts: Parts, k: Tensor) -> Parts:
    """The parts of these keys, for a method that has as many."""
    count = getattr(recipe, "parts", 1)
    if count == 1 or parts.count != count:
        got = f"{parts.count} parts for {type(recipe).__name__} with {count}"
        raise bad_value("as many parts as the method has", got, "the method they were made for, sizes given")
    if tuple(parts.labels.shape) != tuple(k.shape[:3]):
        raise bad_value(f"parts of keys {tuple(k.shape[:3])}", tuple(parts.labels.shape), "ca.groups on these keys")
    return parts


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


def _pack(answer: Attended, state: Any, lse: bool, keep_state: bool) -> Any:
    returned = (answer.out, *([answer.lse] if lse else []), *([state] if keep_state else []))
    return returned if len(returned) > 1 else returned[0]
