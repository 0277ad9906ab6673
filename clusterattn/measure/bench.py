"""Time and peak memory per token against the length, forward and forward + backward, beside exact attention.

The peer is ``F.scaled_dot_product_attention`` as a user would call it; on CUDA every backend of it that runs
is timed and the fastest one counts, at every length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import attention, groups
from .._types import Method
from .rows import Row, environment
from .sample import Sample, mixture
from .speed import Run, interleaved, peak_memory

PEER = "sdpa"
PASSES = ("forward", "forward+backward")
CHECKED_ON = ("cuda",)  # devices where another backend than the reference may answer
CHECKED_LENGTH = 1024  # kernels are proved right on the first so many tokens before they are timed
MEMORY_BY = {"cpu": "torch's CPU allocator (profiler)", "cuda": "torch.cuda.max_memory_allocated"}

Tick = Callable[[str, int], object]  # what is being measured now, and how many steps there are in all


def bench(
    methods: Sequence[Method],
    *,
    lengths: Sequence[int],
    batch: int = 1,
    heads: int = 6,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    causal: bool = False,
    passes: Sequence[str] = PASSES,
    repetitions: int = 5,
    seconds: float = 30.0,
    seed: int = 0,
    memory: bool = True,
    tick: Tick | None = None,
) -> Iterator[Row]:
    """Rows as they are measured, shortest length first: for each pass the peer, then each method."""
    device = torch.device(device)
    steps = len(lengths) * len(passes)
    around = environment(device)
    for n in sorted(lengths):
        sample = mixture(batch, heads, n, dim, seed=seed).to(device, dtype)
        for which in passes:
            backward = which == "forward+backward"
            runs: dict[str, Run] = dict(_peers(sample, causal, backward, device))
            peers, wrong = list(runs), {}
            if tick is not None:
                tick(f"{n} tokens, {which}", steps)
            for method in methods:
                fault = _fault(sample, method, causal, backward, seed) if device.type in CHECKED_ON else None
                if fault is None:
                    runs[str(method)] = pass_of(sample, method, causal=causal, backward=backward, seed=seed)
                else:
                    wrong[str(method)] = fault
            turns = interleaved(runs, repetitions=repetitions, device=device, seconds=seconds)
            taken = {name: min(times) for name, times in turns.items()}
            best = min(peers, key=lambda name: taken[name])
            held = (
                {name: peak_memory(runs[name], device) for name in runs if name in (best, *map(str, methods))}
                if memory
                else {}
            )
            where = {
                **dict(zip("bhnd", (batch, heads, n, dim), strict=True)),
                "dtype": str(dtype).removeprefix("torch."),
                "device": device.type,
                "causal": causal,
                "pass": which,
                "repetitions": len(turns[best]),
                "data": sample.source,
                "memory_by": MEMORY_BY[device.type],
                "environment": around,
            }
            tokens = batch * n
            for name in (best, *map(str, methods)):
                row: Row = {"theme": "bench", "method": PEER if name == best else name}
                if name in wrong:
                    yield {**row, "failed": wrong[name], **where}
                    continue
                yield {
                    **row,
                    "peer": best,
                    "seconds": taken[name],
                    "seconds_per_token": taken[name] / tokens,
                    "speedup": taken[best] / taken[name],
                    "memory_bytes": held.get(name),
                    "memory_per_token": held[name] / tokens if name in held else None,
                    "memory_share": held[name] / max(held[best], 1) if name in held else None,
                    **where,
                }


def pass_of(
    sample: Sample,
    method: Method,
    *,
    causal: bool = False,
    backward: bool = False,
    seed: int = 0,
    backend: str = "auto",
) -> Run:
    """One call of a method as a function of nothing, ready to be timed."""

    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(
            q, k, v, method=method, key_mask=sample.key_mask, causal=causal, seed=seed, backend=backend
        )
        assert isinstance(out, Tensor)
        return out

    return _pass(sample, answer, backward)


def peer_pass(sample: Sample, *, causal: bool = False, backward: bool = False) -> Run:
    """One call of ``F.scaled_dot_product_attention`` on the same tensors."""
    return _pass(sample, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), backward)


def _pass(sample: Sample, answer: Callable[[Tensor, Tensor, Tensor], Tensor], backward: bool) -> Run:
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return answer(sample.q, sample.k, sample.v)

        return forward

    leaves = [x.detach().requires_grad_() for x in (sample.q, sample.k, sample.v)]
    weight = torch.randn(
        (*sample.q.shape[:3], sample.v.shape[3]),
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float32,
    ).to(sample.q)

    def both() -> object:
        return torch.autograd.grad(
            answer(*leaves), leaves, weight, allow_unused=True
        )  # Reformer has no use for k

    return both


def _peers(sample: Sample, causal: bool, backward: bool, device: torch.device) -> Mapping[str, Run]:
    """Exact attention as a user has it for free: on CUDA each backend that can run here, by name."""
    plain = peer_pass(sample, causal=causal, backward=backward)
    if device.type != "cuda":
        return {PEER: plain}
    found: dict[str, Run] = {PEER: plain}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def run(backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend):
                return plain()

        try:
            run()
        except RuntimeError:  # this backend does not take this dtype, shape or GPU
            continue
        found[f"{PEER} {backend.name.split('_')[0].lower()}"] = run
    return found


def _fault(sample: Sample, method: Method, causal: bool, backward: bool, seed: int) -> str | None:
    """Is the fast path right? None when it is, else a sentence.

    With the groups given, its largest error against the reference in fp64 may be 2× (gradients 3×) that of
    the reference in its own dtype.
    """
    q, k, v = (x[:1, :, :CHECKED_LENGTH] for x in (sample.q, sample.k, sample.v))
    given = groups(q.double(), k.double(), method=method, causal=causal, seed=seed, backend="reference")

    def outcome(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_(backward) for x in (q, k, v)]
        out = attention(*leaves, method=method, causal=causal, seed=seed, groups=given, backend=backend)
        assert isinstance(out, Tensor)
        if not backward:
            return [out]
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
        return [
            out.detach(),
            *(torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)),
        ]

    truth, plain, fast = (
        outcome(torch.float64, "reference"),
        outcome(q.dtype, "reference"),
        outcome(q.dtype, "auto"),
    )
    for name, right, usual, ours in zip(("out", "dq", "dk", "dv"), truth, plain, fast, strict=False):
        allowed = (2 if name == "out" else 3) * float((usual.double() - right).abs().max())
        allowed = max(allowed, torch.finfo(q.dtype).eps * float(right.abs().max()))
        miss = float((ours.double() - right).abs().max())
        if not miss <= allowed:
            return f"{name} is off by {miss:.3g} where the reference allows {allowed:.3g}"
    return None
