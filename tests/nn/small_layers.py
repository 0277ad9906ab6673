"""Small attention layers and tokens for the tests of the modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import clusterattn as ca

B, N, DIM, HEADS = 2, 13, 16, 4
SMALL = {
    "exact": ca.Exact(),
    "refined": ca.Refined(clusters=3, top=3, steps=2),
    "smyrf": ca.Smyrf(rounds=2, q_seats=4, k_seats=4),
    "routing": ca.Routing(clusters=3, window=4, decay=0.5),
    "reformer": ca.Reformer(rounds=2, chunk=4),
}


def tokens(seed: int = 1, n: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(B, n, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def padding(n: int = N) -> Tensor:
    """torch's convention, True = padding; at the end, as torch's fast paths like it."""
    return torch.arange(n) >= torch.tensor([[n], [n - 3]])


def causal_mask(n: int = N) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


def grads(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}
