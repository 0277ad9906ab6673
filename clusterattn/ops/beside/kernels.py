"""One pass over keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import jit, power, precision, rows, tl, why_no_kernels
from .._launch import cdiv, launch


@jit
def beside_kernel(
    K, V, VIEW, KEY_CENTRE, VALUE_CENTRE, SHRINK, OUT, m, d, e, r, heads, skb, skh, skm, svb, svh, svm,
    BM: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lead, key = tl.program_id(1).to(tl.int64), tl.program_id(0) * BM + tl.arange(0, BM)
    dims, values, ways, here = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BR), key < m
    at, batch, head = key.to(tl.int64)[:, None], lead // heads, lead % heads
    of_k, of_v = here[:, None] & (dims < d)[None, :], here[:, None] & (values < e)[None, :]
    k = tl.load(K + batch * skb + head * skh + at * skm + dims[None, :], mask=of_k, other=0.0)
    view = tl.load(
        VIEW + (lead * d + dims[:, None]) * r + ways[None, :], mask=(dims < d)[:, None] & (ways < r)[None, :], other=0.0
    )
    centre = tl.load(KEY_CENTRE + lead * d + dims, mask=dims < d, other=0.0)
    x = (k.to(tl.float32) - centre[None, :]).to(k.dtype)
    seen = tl.dot(x, view.to(k.dtype), input_precision=PRECISION)
    to = (lead * m + key)[:, None] * (r + e)
    tl.store(OUT + to + ways[None, :], seen.to(OUT.dtype.element_ty), mask=here[:, None] & (ways < r)[None, :])
    v = tl.load(V + batch * svb + head * svh + at * svm + values[None, :], mask=of_v, other=0.0).to(tl.float32)
    centre = tl.load(VALUE_CENTRE + lead * e + values, mask=values < e, other=0.0)
    v = (v - centre[None, :]) / tl.load(SHRINK + lead)
    tl.store(OUT + to + r + values[None, :], v.to(OUT.dtype.element_ty), mask=of_v)


def why_not(k: Tensor, v: Tensor, view: Tensor) -> str | None:
    if v.shape[-1] > 256:
        return f"kernels hold value dimensions up to 256, this one is {v.shape[-1]}"
    if 0 in k.shape or 0 in v.shape or 0 in view.shape:
        return "there is nothing to launch for an empty tensor"
    return why_no_kernels(k)


def beside(k: Tensor, v: Tensor, view: Tensor, key_centre: Tensor, value_centre: Tensor, shrink: Tensor) -> Tensor:
    k, v = rows(k), rows(v)
    (b, hk, m, d), e, r = k.shape, v.shape[3], view.shape[3]
    out = torch.empty(b, hk, m, r + e, dtype=k.dtype, device=k.device)
    tile = 64 if k.element_size() == 2 else 16
    launch(
        beside_kernel, (cdiv(m, tile), b * hk),
        (k, v, *(x.float().contiguous() for x in (view, key_centre, value_centre, shrink)), out),
        (m, d, e, r, hk, *k.stride()[:3], *v.stride()[:3]),
        BM=tile, BD=power(d), BE=power(e), BR=power(r), PRECISION=precision(k), num_warps=4,
    )  # fmt: skip
    return out
