"""What a caller may give: everything is checked here, once, and becomes a Call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._errors import bad_type, bad_value
from ._types import Buckets, Call, Clusters, Groups, Mask, Method, Parts
from .methods import Auto, Exact, Refined
from .methods.budgets import Shape
from .ops import choose

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def only_choice(
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, groups: Groups = None, **_: Any
) -> type[Method] | None:
    """What a call asks for that leaves Auto no choice."""
    if attn_mask is not None or dropout_p > 0.0:
        return Exact
    return None if groups is None else Refined


def filled(recipe: Method, q: Tensor, k: Tensor, v: Tensor, causal: bool, only: type[Method] | None = None) -> Method:
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


def checked_call(
    recipe: Method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    key_lengths: Tensor | None,
    query_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    generator: torch.Generator | None,
    seed: int | Tensor,
    backend: str,
    points: Tensor | None,
) -> Call:
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
    if scale is not None:
        if not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
            raise bad_type("scale a number", type(scale).__name__, "float(scale), or leaving it out: 1/sqrt(d)")
        if not abs(scale) < math.inf:  # NaN is not, either
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


def with_extras(
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
    if attn_mask is not None and not recipe.takes_bias:
        raise bad_value(
            "no attn_mask: clustering cannot honour a dense mask or an additive bias",
            f"attn_mask {tuple(attn_mask.shape)}",
            "method=ca.Exact(), or key_mask / causal where they say the same",
        )
    if not 0.0 <= dropout_p < 1.0:
        raise bad_value("dropout_p in [0, 1)", dropout_p, "dropout_p=0.0")
    if dropout_p > 0.0 and not recipe.takes_bias:
        raise bad_value(
            f"dropout_p=0.0: {type(recipe).__name__} never holds the weights that dropout would thin out",
            dropout_p,
            "dropout on the output, or method=ca.Exact()",
        )
    if (state is not None or keep_state) and not recipe.stateful:
        raise bad_value(
            "a method with state (Routing, ClusterFormer)", type(recipe).__name__, "leaving out state and return_state"
        )
    if call.points is not None and not recipe.takes_points:
        raise bad_value("points only with method=ClusterFormer", type(recipe).__name__, "leaving out points")
    if attn_mask is not None:
        try:
            torch.broadcast_shapes(attn_mask.shape, (*q.shape[:3], k.shape[2]))  # type: ignore[no-untyped-call]
        except RuntimeError:
            shape = (*q.shape[:3], k.shape[2])
            raise bad_value(f"attn_mask that broadcasts to {shape}", tuple(attn_mask.shape), "(b 1 n m)") from None
    return replace(call, lse=lse, state=state, keep_state=keep_state, attn_mask=attn_mask, dropout_p=dropout_p)


def known_groups(recipe: Method, groups: Groups, q: Tensor, k: Tensor) -> Groups:
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


def known_parts(recipe: Method, parts: Parts, k: Tensor) -> Parts:
    """The parts of these keys, for a method that has as many."""
    count = getattr(recipe, "parts", 1)
    if count == 1 or parts.count != count:
        got = f"{parts.count} parts for {type(recipe).__name__} with {count}"
        raise bad_value("as many parts as the method has", got, "the method they were made for, sizes given")
    if tuple(parts.labels.shape) != tuple(k.shape[:3]):
        raise bad_value(f"parts of keys {tuple(k.shape[:3])}", tuple(parts.labels.shape), "ca.groups on these keys")
    return parts
