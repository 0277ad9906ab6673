"""Time and peak memory per token against the length, forward and forward + backward, beside exact attention.

The peer is ``F.scaled_dot_product_attention`` as a user would call it. On the CPU all take turns; on CUDA the
figures come from a race (race.py): checked first, then timed as CUDA graphs against the best backend of the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._attention import attention, groups
from .._errors import bad_value
from .._progress import Tick
from .._rows import Row, environment
from .._types import Method
from .error import relative_error
from .sample import Sample, Shape, mixture
from .speed import Run, interleaved, peak_memory

PEER = "sdpa"
PASSES = ("forward", "forward+backward")
CHECKED_ON = ("cuda",)  # devices where another backend than the reference may answer
CHECKED_LENGTH = 2048  # kernels are proved right on the first so many tokens before they are timed
TOKENS = 32768  # on CUDA as many sequences as make so many tokens run together
GRADIENTS = ("dq", "dk", "dv")
MEMORY_BY = {"cpu": "torch's CPU allocator (profiler)", "cuda": "torch.cuda.max_memory_allocated"}


def bench(
    methods: Sequence[Method],
    *,
    lengths: Sequence[int],
    batch: int | None = None,
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
    data: Sample | Callable[[Shape], Sample] | None = None,
    tick: Tick | None = None,
) -> Iterator[Row]:
    """Rows as they are measured, shortest length first: for each pass the peer, then each method.

    batch    None: 1 on the CPU, and on CUDA as many as make 32 768 tokens together
    data     instead of a synthetic mixture: what this function makes for a shape (b, h, n, d); or the beginning of
             these q, k, v, whose heads and dim then count
    """
    device = torch.device(device)
    if isinstance(data, Sample):
        _, heads, longest, _, dim, _ = data.shape
        if max(lengths) > longest:
            raise bad_value(f"lengths up to {longest}, which is all the data has", max(lengths), f"{longest}")
    if device.type == "cuda":
        from .race import Race  # which is made of the parts below

        race = Race(device, dtype, causal=causal, seed=seed, data=data)
        for n, method in product(sorted(lengths), methods):
            if tick is not None:
                tick(f"{n} tokens, {method}", len(lengths) * len(methods))
            shape = (batch or max(TOKENS // n, 1), heads, n, dim)
            yield from race.rows(method, shape, passes=passes, memory=memory)
        return
    batch, steps = batch or 1, len(lengths) * len(passes)
    around = environment(device)
    for n in sorted(lengths):
        if data is None:
            sample = mixture(batch, heads, n, dim, seed=seed)
        else:
            sample = data.cut(batch, n) if isinstance(data, Sample) else data((batch, heads, n, dim))
        sample = sample.to(device, dtype)
        errors = _errors(sample, methods, causal, seed)
        for which in passes:
            backward = which == "forward+backward"
            runs: dict[str, Run] = {PEER: peer_pass(sample, causal=causal, backward=backward)}
            wrong = {}
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
            held = {name: peak_memory(run, device) for name, run in runs.items()} if memory else {}
            shared = {
                **dict(zip("bhnd", (batch, heads, n, dim), strict=True)),
                "dtype": str(dtype).removeprefix("torch."),
                "device": device.type,
                "causal": causal,
                "pass": which,
                "repetitions": len(turns[PEER]),
                "data": sample.source,
                "memory_by": MEMORY_BY[device.type],
                "environment": around,
            }
            for name in (PEER, *map(str, methods)):
                measured = {"failed": wrong[name]} if name in wrong else _per_token(name, taken, held, batch * n)
                yield {"theme": "bench", "method": name, **measured, "error": errors.get(name), **shared}


def _errors(sample: Sample, methods: Sequence[Method], causal: bool, seed: int) -> dict[str, float]:
    """How far each method's answer is from the peer's, relative to it."""
    exact = peer_pass(sample, causal=causal)()
    assert isinstance(exact, Tensor)
    found = {}
    for method in methods:
        out = pass_of(sample, method, causal=causal, seed=seed)()
        assert isinstance(out, Tensor)
        found[str(method)] = relative_error(out, exact)
    return found


def _per_token(name: str, taken: Mapping[str, float], held: Mapping[str, int], tokens: int) -> Row:
    """Time and memory of one, by itself, for each token and beside the peer."""
    return {
        "peer": PEER,
        "seconds": taken[name],
        "seconds_per_token": taken[name] / tokens,
        "speedup": taken[PEER] / taken[name],
        "memory_bytes": held.get(name),
        "memory_per_token": held[name] / tokens if name in held else None,
        "memory_share": held[name] / max(held[PEER], 1) if name in held else None,
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
        out = attention(q, k, v, method=method, key_mask=sample.key_mask, causal=causal, seed=seed, backend=backend)
        assert isinstance(out, Tensor)
        return out

    return pass_through(sample, answer, backward)


def peer_pass(sample: Sample, *, causal: bool = False, backward: bool = False) -> Run:
    """One call of ``F.scaled_dot_product_attention`` on the same tensors."""
    return pass_through(sample, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), backward)


def pass_through(sample: Sample, answer: Callable[[Tensor, Tensor, Tensor], Tensor], backward: bool) -> Run:
    """Any attention (q, k, v -> out) over these tensors, forward or forward + backward, ready to be timed."""
    if not backward:

        def forward() -> object:
            with torch.no_grad():
                return answer(sample.q, sample.k, sample.v)

        return forward

    leaves = [x.detach().requires_grad_() for x in (sample.q, sample.k, sample.v)]
    d_out = direction(sample)

    def both() -> object:
        return torch.autograd.grad(answer(*leaves), leaves, d_out, allow_unused=True)  # Reformer has no use for k

    return both


def direction(sample: Sample) -> Tensor:
    """The gradient of out that backward starts from, (b h n e)."""
    shape, device = (*sample.q.shape[:3], sample.v.shape[3]), sample.q.device
    draw = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=draw, device=device, dtype=torch.float32).to(sample.q)


FACTORS = {"bmm": (0, 1), "mm": (0, 1), "baddbmm": (1, 2), "baddbmm_": (1, 2), "addmm": (1, 2), "addmm_": (1, 2)}


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The reference, with both factors of every matrix product and the product rounded to ``dtype``; sums inside stay
    as wide as they are.

    That is what PyTorch's own products in that dtype do, and so it is the fair yardstick for a kernel: the plain
    reference multiplies in fp32 whatever came in, and errs only where it rounds its answer. No kernel in half precision
    can follow it there (weights and their gradients go through a product in its own dtype), however right it is. On a
    GPU the kernels multiply fp32 as three products of tf32, whose factors have 22 bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "clusterattn":  # one of our own operators: look inside
            kind = next(x.device.type for x in args if isinstance(x, Tensor)).upper()
            key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, kind))
            with self:
                return func.redispatch(key, *args, **kwargs)
        name = func.overloadpacket.__name__
        if name not in FACTORS:
            return func(*args, **kwargs)
        rounded = [_as_factor(x, self.dtype) if i in FACTORS[name] else x for i, x in enumerate(args)]
        product = func(*rounded, **kwargs)
        return product.copy_(product.to(self.dtype)) if name.endswith("_") else product.to(self.dtype).to(product.dtype)


def _as_factor(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The number that a product in this dtype reads in the place of x."""
    if dtype != torch.float32 or not x.is_cuda or x.dtype != torch.float32:
        return x.to(dtype).to(x.dtype)
    high = _as_tf32(x)
    return high + _as_tf32(x - high)


def _as_tf32(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _fault(sample: Sample, method: Method, causal: bool, backward: bool, seed: int) -> str | None:
    """Is the fast path right? None when it is, else a sentence that begins with what is wrong.

    With the groups given, its error against the reference in fp64 may be 2× (gradients 3×) that of the reference
    with products in its own dtype, both the largest and the relative l2 error. 8 roundings of the largest number
    (for the l2 error: one rounding) are always allowed.
    """
    q, k, v = (x[:1, :, :CHECKED_LENGTH] for x in (sample.q, sample.k, sample.v))
    key_mask = None if sample.key_mask is None else sample.key_mask[:1, :CHECKED_LENGTH]
    call: dict[str, Any] = {"method": method, "key_mask": key_mask, "causal": causal, "seed": seed}
    d_out, given = direction(Sample(q, k, v)), groups(q.double(), k.double(), v.double(), backend="reference", **call)

    def outcome(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_(backward) for x in (q, k, v)]
        out = attention(*leaves, groups=given, backend=backend, **call)
        assert isinstance(out, Tensor)
        if not backward:
            return [out]
        with torch.autograd.set_multithreading_enabled(False):  # the rounding above belongs to this thread
            grads = torch.autograd.grad(out, leaves, d_out.to(dtype), allow_unused=True)
        return [
            out.detach(),
            *(torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads, strict=True)),
        ]

    rounding = torch.finfo(q.dtype).eps
    truth, fast = outcome(torch.float64, "reference"), outcome(q.dtype, "auto")
    with RoundedProducts(q.dtype) if q.dtype.itemsize < 4 else nullcontext():
        rounded = outcome(q.dtype, "reference")
    plain = outcome(q.dtype, "reference")  # near keys that tie fall on either side: both are right
    for name, right, *usual, ours in zip(("out", *GRADIENTS), truth, rounded, plain, fast, strict=False):
        times, scale, size = 2 if name == "out" else 3, float(right.abs().max()), float(right.norm())
        ours, usual = ours.double() - right, [one.double() - right for one in usual]
        largest, length = max(float(one.abs().max()) for one in usual), max(float(one.norm()) for one in usual)
        miss, allowed = float(ours.abs().max()), max(times * largest, 8 * rounding * scale)
        if not miss <= allowed:
            return f"{name} is off by {miss:.3g} where the reference allows {allowed:.3g}"
        miss, allowed = float(ours.norm()), max(times * length, rounding * size)
        if not miss <= allowed:
            return f"{name} is off by {miss / size:.3g} in l2 where the reference allows {allowed / size:.3g}"
    return None
