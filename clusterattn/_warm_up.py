"""Compile ahead what a call will need: kernels are compiled when a kind of call is first made."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from ._attention import DEFAULT, attention
from ._errors import check_whole
from .methods import MethodSpec


def warm_up(
    lengths: int | Iterable[int],
    *,
    method: MethodSpec = DEFAULT,
    batch: int = 1,
    heads: int = 8,
    key_heads: int | None = None,
    dim: int = 64,
    value_dim: int | None = None,
    keys: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cuda",
    causal: bool = False,
    masked: bool = False,
    backward: bool = True,
) -> dict[int, float]:
    """Make calls like those to come, on random tensors, so that the first real one finds its kernels compiled.

    Args:
        lengths: of the queries; one of each kind is enough: a kernel serves every length, but sizes that a method
            leaves open follow it in steps (512, 768, 1 024, 1 536, ...)
        method: a method, its name, or "name:key=value,..."
        batch: sequences in a call
        heads: query heads
        key_heads: key heads; None: as many as query heads
        dim: of queries and keys
        value_dim: of values; None: as of keys
        keys: how many, where they are not as many as the queries
        dtype: of q, k and v
        device: where the calls will run
        causal: causal calls
        masked: with a key_mask
        backward: forward and backward; False: forward under no_grad

    The others are those of ``ca.attention``: what is compiled depends on the method with its sizes, dtype, head dims,
    causal or not, masked or not. Kernels stay in Triton's cache folder (``~/.triton/cache``, or ``TRITON_CACHE_DIR``)
    for later processes, which load them in milliseconds; ``clusterattn warm-up`` fills it from a shell. On a CPU
    nothing is compiled. Returns the seconds that each length took; torch's random numbers are left alone.
    """
    wanted = [lengths] if isinstance(lengths, int) else list(lengths)
    key_heads, value_dim = key_heads or heads, value_dim or dim
    check_whole("warm_up", batch=batch, heads=heads, key_heads=key_heads, dim=dim, value_dim=value_dim)
    device, taken = torch.device(device), {}
    draw = torch.Generator(device).manual_seed(0)
    for n in wanted:
        check_whole("warm_up", lengths=n)
        m = n if keys is None else keys
        sizes = ((heads, n, dim), (key_heads, m, dim), (key_heads, m, value_dim))
        q, k, v = (
            torch.randn(batch, *size, generator=draw, device=device).to(dtype).requires_grad_(backward)
            for size in sizes
        )
        keep = torch.ones(batch, m, dtype=torch.bool, device=device) if masked else None
        began = time.perf_counter()
        with torch.set_grad_enabled(backward):
            for _ in range(2):  # the second is replayed, which compiles nothing but must be learned
                out = attention(q, k, v, method=method, causal=causal, key_mask=keep)
                if backward:
                    torch.autograd.grad(out, (q, k, v), torch.ones_like(out), allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken[n] = time.perf_counter() - began
    return taken
