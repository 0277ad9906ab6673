"""How far from exact attention, for the price of a few queries: an estimate with its interval, for lengths where the
whole of exact attention would cost what the approximation saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._attention import attention
from .._errors import bad_value, check_whole
from .._types import Mask, Method
from ..methods import MethodSpec
from ..methods import method as as_method
from ..ops.draw import bits

RESAMPLES = 499
STREAM_QUERIES, STREAM_RESAMPLES = 101, 102  # no method draws from these, so the sample knows nothing of the groups
AT_ONCE = 2**23  # numbers held at a time
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class ErrorReport:
    """‖out − exact‖ / ‖exact‖, estimated from sampled queries, with the ends of its interval.

    ``heads``, ``heads_low``, ``heads_high`` (b h) are the same for each head; each interval holds by itself, not all
    of them at once. ``queries`` (b h s) are the sampled positions (-1: no more real queries) and ``query_errors``
    (b h s) their own measured errors, in units of the head's root mean square ‖exact‖.

    Attributes:
        method: what was asked
        error: the estimate
        low: lower end of its interval
        high: upper end
        heads: (b h): the estimate for each head
        heads_low: (b h): lower ends
        heads_high: (b h): upper ends
        queries: (b h s): sampled positions, -1 where there are no more real queries
        query_errors: (b h s): errors of the sampled queries
        sample: queries for each head
        confidence: of the intervals
        cost_share: of exact attention's multiply-adds, spent on the sample
    """

    method: Method
    error: float
    low: float
    high: float
    heads: Tensor
    heads_low: Tensor
    heads_high: Tensor
    queries: Tensor
    query_errors: Tensor
    sample: int
    confidence: float
    cost_share: float

    @property
    def beyond(self) -> float:
        """With this confidence, at most this share of a head's queries is worse than its worst sampled one.

        True of any distribution: a share p of worse queries stays unseen with probability (1 − p)^sample.
        """
        return float(1 - (1 - self.confidence) ** (1 / self.sample))

    def __str__(self) -> str:
        worst = int(self.heads.argmax())
        where = f"batch {worst // self.heads.shape[1]}, head {worst % self.heads.shape[1]}"
        flat = [x.flatten()[worst].item() for x in (self.heads, self.heads_low, self.heads_high)]
        return (
            f"{self.method}: relative output error {self.error:.4f} ({self.confidence:.0%} interval {self.low:.4f} to "
            f"{self.high:.4f}), from {self.sample} queries per head, {self.cost_share:.1%} of exact attention's work\n"
            f"worst of {self.heads.numel()} heads: {where}, {flat[0]:.4f} ({flat[1]:.4f} to {flat[2]:.4f})"
        )


def error_report(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: MethodSpec = "refined",
    *,
    sample: int = 64,
    confidence: float = 0.95,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    seed: int = 0,
    out: Tensor | None = None,
    **options: Any,
) -> ErrorReport:
    """The relative output error of a method, from exact attention on a random sample of queries per head.

    Costs sample × m per head beside the method itself; ``out`` spares that too, where the answer is already there.
    Masks, causality, scale, seed and further options are those of ``ca.attention``.

    The interval is a studentised bootstrap of the logarithm of Σ‖out − exact‖² / Σ‖exact‖², stratified by head. It is
    honest because queries are drawn uniformly, without replacement and independently of the groups, so nothing is
    assumed about the method, and because errors are skewed and studentising on the log scale follows the skew, where
    a plain Student interval is too low several times too often. It can only know the tail that the
    sample has seen: ``beyond`` says how large an unseen part may be.

    Args:
        q: queries (b h n d)
        k: keys (b hk m d); hk divides h
        v: values (b hk m e)
        method: a method, its name, or "name:key=value,..."
        sample: queries of each head that are answered exactly, at least 8
        confidence: of the intervals
        key_mask: bool (b m), True = a real key
        query_mask: bool (b n), True = a real query
        causal: as in ``ca.attention``
        scale: of the logits, 1/sqrt(d) by default
        seed: of the method's draws, and of the sample
        out: the method's answer (b h n e), where it is there already
        **options: further ones of ``ca.attention``
    """
    chosen = as_method(method)
    check_whole("error_report", sample=sample)
    if sample < 8:
        raise bad_value("sample of at least 8 queries per head", sample, "sample=64")
    if not 0.5 <= confidence < 1.0:
        raise bad_value("confidence in [0.5, 1)", confidence, "confidence=0.95")
    with torch.no_grad():
        if out is None:
            out = attention(
                q,
                k,
                v,
                method=chosen,
                key_mask=key_mask,
                query_mask=query_mask,
                causal=causal,
                scale=scale,
                seed=seed,
                **options,
            )
        if not isinstance(out, Tensor) or out.shape != (*q.shape[:3], v.shape[3]):
            came = tuple(out.shape) if isinstance(out, Tensor) else "several results"
            raise bad_value(f"one answer of shape {(*q.shape[:3], v.shape[3])}", came, "no return_… option")
        real = _real_queries(q, k, key_mask, query_mask, causal)
        at = _draw_queries(real.unsqueeze(1).expand(q.shape[:3]), sample, seed)
        there = at >= 0
        exact = _exact_rows(_rows(q, at), at, k, v, q.shape[2], key_mask, causal, scale)
        miss = ((_rows(out, at).double() - exact).square().sum(-1) * there).cpu()
        size = (exact.square().sum(-1) * there).cpu()
    total = real.sum(-1).view(-1, 1).expand(at.shape[:2]).flatten().double().cpu()  # real queries of each head
    heads, whole = _intervals(miss.flatten(0, 1), size.flatten(0, 1), total, confidence, seed)
    usual = (size.sum(-1, keepdim=True) / there.sum(-1, keepdim=True).clamp(min=1).cpu()).clamp_min(TINY)
    ratio, low, high = (x.view(at.shape[:2]) for x in heads)
    return ErrorReport(
        method=chosen,
        error=float(whole[0]),
        low=float(whole[1]),
        high=float(whole[2]),
        heads=ratio,
        heads_low=low,
        heads_high=high,
        queries=at.cpu(),
        query_errors=(miss / usual).sqrt(),
        sample=sample,
        confidence=confidence,
        cost_share=float(there.sum() / max(int(there[..., 0].numel()) * q.shape[2], 1)),
    )


def _real_queries(q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, causal: bool) -> Tensor:
    """(b n): queries that are no padding and may see something."""
    mask = Mask(q.shape[2], k.shape[2], key_mask, query_mask, causal)
    real, blind = mask.query_rows(q), mask.blind(q)
    return real if blind is None else real & ~blind


def _draw_queries(real: Tensor, sample: int, seed: int) -> Tensor:
    """``sample`` distinct positions of real queries, uniformly for each head by itself: (b h s), -1 once they are used
    up. The lots follow the rank among real queries, so padding changes nothing."""
    b, h, n = real.shape
    head = torch.arange(b * h, device=real.device).view(b, h, 1)
    lot = bits((real.cumsum(-1) + (head << 32)).contiguous(), seed, STREAM_QUERIES)
    drawn, at = torch.where(real, lot, 2**33).topk(min(sample, n), largest=False, sorted=True)
    return torch.where(drawn < 2**33, at, -1)


def _rows(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(2, at.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))


def _exact_rows(
    rows: Tensor, at: Tensor, k: Tensor, v: Tensor, n: int, key_mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    """Exact attention, in fp64, of the queries (b h s d) that stand at positions ``at``: (b h s e)."""
    (b, h, s, d), (_, hk, m, _) = rows.shape, k.shape
    scale = d**-0.5 if scale is None else scale
    keys, values = k.double().mT, v.double()
    key_at = torch.arange(m, device=k.device)
    parts = []
    step = max(1, AT_ONCE // max(b * h * m, 1))
    for start in range(0, s, step):
        part = rows[:, :, start : start + step].double()
        logits = (part.reshape(b, hk, -1, d) @ keys).view(b, h, -1, m) * scale
        if key_mask is not None:
            logits = logits.masked_fill(~key_mask[:, None, None, :], float("-inf"))
        if causal:
            stands = at[:, :, start : start + step, None].clamp(min=0) + (m - n)
            logits = logits.masked_fill(key_at > stands, float("-inf"))
        weights = logits.softmax(-1).nan_to_num(0.0)  # a row without keys stands for a query that was not drawn
        parts.append((weights.view(b, hk, -1, m) @ values).view(b, h, -1, v.shape[3]))
    return torch.cat(parts, 2)


# ---------------------------------------------------------------------------------------------------- the interval


def _intervals(
    miss: Tensor, size: Tensor, total: Tensor, confidence: float, seed: int
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Error, low and high: of each head, and of all heads together. miss, size (heads s), total (heads)."""
    heads, s = miss.shape
    complete = total <= s  # every query of the head was looked at: nothing is left to chance
    drawn = torch.where(complete, total, float(s))
    seen = _moments(miss, size, drawn, total, torch.ones(1, 1, s, dtype=miss.dtype))
    step = max(1, AT_ONCE // (RESAMPLES * s))
    again = [
        _moments(miss[i:j], size[i:j], drawn[i:j], total[i:j], _resample(i, min(j, heads), s, seed))
        for i, j in ((i, i + step) for i in range(0, heads, step))
    ]
    resampled = torch.where(complete[:, None, None], seen, torch.cat(again))
    each = _interval(seen, resampled, confidence, s)
    together = _interval(seen.sum(0, keepdim=True), resampled.sum(0, keepdim=True), confidence, s)
    return each, together


def _resample(first: int, last: int, s: int, seed: int) -> Tensor:
    """(some R s): how often each of the s sampled queries is drawn again, for heads ``first`` up to ``last``."""
    counter = torch.arange(first * RESAMPLES * s, last * RESAMPLES * s).view(last - first, RESAMPLES, s)
    which = (bits(counter, seed, STREAM_RESAMPLES) * s) >> 32
    times = torch.zeros(which.shape, dtype=torch.float64)
    return times.scatter_add_(2, which, torch.ones_like(times))


def _moments(miss: Tensor, size: Tensor, drawn: Tensor, total: Tensor, times: Tensor) -> Tensor:
    """Estimated sums over a head's queries of miss and size, and the variances and covariance of these estimates
    (sampling without replacement), when sampled query i counts ``times`` (heads R s): (heads R 5)."""
    columns = torch.stack([miss, size, miss * miss, miss * size, size * size], -1)  # (heads s 5)
    x, y, xx, xy, yy = (times @ columns / drawn.clamp(min=1)[:, None, None]).unbind(-1)
    total = total[:, None]
    left = (1 - drawn[:, None] / total.clamp(min=1)).clamp(min=0)
    spread = total**2 * left / (drawn[:, None] - 1).clamp(min=1)
    return torch.stack([total * x, total * y, spread * (xx - x * x), spread * (xy - x * y), spread * (yy - y * y)], -1)


def _interval(seen: Tensor, resampled: Tensor, confidence: float, s: int) -> tuple[Tensor, Tensor, Tensor]:
    """From moments (heads 1 5) and (heads R 5) to the error and its bounds, each (heads)."""
    ratio, wide = _ratio(seen)  # (heads 1)
    again, its = _ratio(resampled)
    # A resample without its one large miss says "less than one in s", not "never", and not "for certain".
    again, its = again.maximum(ratio / (2 * s)), its.maximum(wide / 2)
    shift = (again.clamp_min(TINY) / ratio.clamp_min(TINY)).log() / its.clamp_min(TINY)
    ends = shift.quantile(torch.tensor([(1 + confidence) / 2, (1 - confidence) / 2], dtype=shift.dtype), dim=1)
    low, high = (ratio.squeeze(1) * torch.exp(-end * wide.squeeze(1)) for end in ends)
    middle = ratio.squeeze(1)
    return middle.sqrt(), low.minimum(middle).sqrt(), high.maximum(middle).sqrt()


def _ratio(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Σ miss / Σ size, and the standard error of its logarithm."""
    x, y, xx, xy, yy = moments.unbind(-1)
    r = x / y.clamp_min(TINY)
    residual = (xx - 2 * r * xy + r * r * yy).clamp(min=0)
    return r, residual.sqrt() / x.clamp_min(TINY)
