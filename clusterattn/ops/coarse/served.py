"""The verb coarse by kernels, in the reference's terms: for one part and no slope, which is what stands alone. Parts
and slope are served inside near_and_far."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backward_kernels, kernels
from .arrange import in_order
from .kernels import Far
from .reference import Found, Gradients, Reach


def forward(
    c: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, part_of: Tensor | None, pi: Tensor | None, reach: Reach
) -> tuple[Found, Tensor]:
    b, h, rows, d = c.shape
    far = kernels.forward(c, in_order(k, v, key_mask), None, reach)
    lead = (b, h, rows)
    found = Found(
        far.out.view(*lead, 1, -1), far.mean_key.view(*lead, 1, far.mean_key.shape[-1]), far.lse.view(*lead, 1),
        far.near_lse.view(lead), far.near_at.view(*lead, far.near_at.shape[-1]),
        far.slope.view(b, h, 0, d, v.shape[3]),
    )  # fmt: skip
    return found, far.bits.view(b, h, far.bits.shape[1], rows)


def backward(
    given: Gradients, c: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, part_of: Tensor | None,
    pi: Tensor | None, found: Found, bits: Tensor, reach: Reach,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    b, h, rows, _ = c.shape

    def far(x: Tensor) -> Tensor:
        return x.reshape(b * h, 1, rows, *x.shape[4:])

    def asked(gradient: Tensor | None, x: Tensor) -> Tensor:
        return far(gradient if gradient is not None else torch.zeros_like(x) if x.numel() else x)

    there = Far(
        far(found.out), far(found.mean_key), far(found.lse), found.near_lse.view(b * h, rows),
        found.near_at.view(b * h, rows, found.near_at.shape[-1]), bits, found.slope,
    )  # fmt: skip
    wanted = backward_kernels.Given(
        asked(given.out, found.out), asked(given.mean_key, found.mean_key),
        None if given.lse is None else far(given.lse), given.near_lse,
    )  # fmt: skip
    keys = in_order(k, v, key_mask)
    return backward_kernels.backward(backward_kernels.prepared(wanted, keys, there, reach), c, keys, there, reach)
