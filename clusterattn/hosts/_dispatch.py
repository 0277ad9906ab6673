"""What diffusers' dispatcher calls: one attention call, by a method or exactly, whole or as a rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from .._attention import attention
from .._plan import LayerPlan
from .._report import log_once, text
from .._types import Method
from ..methods import Auto, Clustered, Exact
from ..methods.budgets import Shape
from ._parallel import layout, over_ring
from ._served import CallCounts, answer, answer_with_weight, chosen, heads_first

Answer = Union[Tensor, tuple[Tensor, Tensor]]  # (b n h e), and the log-weight (b n h) where it is asked for


class DispatchOptions(NamedTuple):
    """What a call says besides q, k and v."""

    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None
    lse: bool


@dataclass
class Steps:
    """Counts denoising steps by the timestep that the model is given: a lower one is the next step, a higher one the
    first step of another run. (Guidance may ask several times in a step.)"""

    dense: int
    step: int = -1
    last: float = 0.0

    def see(self, timestep: Tensor | float) -> None:
        now = float(timestep.max() if isinstance(timestep, Tensor) else timestep)
        if self.step < 0 or now > self.last:
            self.step = 0
        elif now < self.last:
            self.step += 1
        self.last = now

    @property
    def early(self) -> bool:
        return self.step < self.dense


@dataclass(frozen=True, eq=False)
class DiffusersBackend:
    """The settings of ``register`` or ``swap`` at work. ``served`` counts how calls were answered."""

    method: LayerPlan
    min_length: int
    exact_rows: int
    joint: bool
    cross: bool
    name: str
    steps: Steps | None = None
    served: CallCounts = field(default_factory=CallCounts)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Answer:
        """(b n h d), (b m hk d), (b m hk e) -> (b n h e). The names are diffusers', which passes what it finds here."""
        given = DispatchOptions(attn_mask, dropout_p, is_causal, scale, return_lse)
        if _parallel_config is None:
            return self.attend(query, key, value, given)
        method = self._over_ring(query, key, value, given, _parallel_config.context_parallel_config)
        if method is not None:
            self.served.note(text(method))
            whole: Answer = over_ring(
                query,
                key,
                value,
                method,
                scale,
                return_lse,
                self.exact_rows,
                self.joint,
                _parallel_config.context_parallel_config,
            )
            return whole
        from diffusers.models.attention_dispatch import _templated_context_parallel_attention

        parts: Answer = _templated_context_parallel_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            forward_op=self._forward,
            backward_op=self._backward,
            _parallel_config=_parallel_config,
        )
        return parts

    # ------------------------------------------------------------------ one call

    def attend(self, q: Tensor, k: Tensor, v: Tensor, given: DispatchOptions, parallel: Any = None) -> Answer:
        """``parallel``: the context parallelism of which this call is a part."""
        keys = _key_mask(given.mask, q, k)
        method = self._of_heads(q.shape[2], parallel)
        reason = self._why_exact(q, k, method, given, keys, 1 if parallel is None else parallel.ring_degree)
        if not reason and isinstance(method, Method):
            method, reason = self._chosen(method, q, k, v, given, parallel)
        self.served.note("exact" if reason else text(method), reason)
        if reason:
            return _exact(q, k, v, given)
        where = layout(q.shape[1], self.exact_rows, self.joint, parallel, q.device)
        if where.order is not None:
            q, k, v = (x[:, where.order] if x.shape[1] == q.shape[1] else x for x in (q, k, v))
            keys = keys[:, where.order] if keys is not None and keys.shape[1] == q.shape[1] else keys
        answers = [_by(Exact() if exact else method, q[:, rows], k, v, keys, given) for rows, exact in where.pieces]
        whole = [torch.cat(each, 1) if len(each) > 1 else each[0] for each in zip(*answers, strict=True)]
        out, *lse = whole if where.back is None else (each[:, where.back] for each in whole)
        return (out, lse[0]) if given.lse else out

    def _of_heads(self, heads: int, parallel: Any) -> LayerPlan:
        """Of the methods of single heads, those of the heads that this rank of Ulysses has."""
        if isinstance(self.method, Method) or parallel is None or parallel.ulysses_degree == 1:
            return self.method
        first = parallel._ulysses_local_rank * heads
        return self.method[first : first + heads]

    @staticmethod
    def _chosen(
        method: Method, q: Tensor, k: Tensor, v: Tensor, given: DispatchOptions, parallel: Any
    ) -> tuple[Method, str]:
        """Under Ulysses as on one device, whose call has the heads of all ranks."""
        (b, n, h, d), (_, m, hk, e) = q.shape, v.shape
        rows = b * h * (1 if parallel is None else parallel.ulysses_degree)
        return chosen(method, Shape(n, m, d, e, given.causal, h // hk), rows, q.device, q.dtype)

    def _why_exact(
        self, q: Tensor, k: Tensor, method: LayerPlan, given: DispatchOptions, keys: Tensor | None, ring: int
    ) -> str:
        """ "" where the method serves the call. What the settings ask for needs no word, an obstacle is logged once."""
        n, m = q.shape[1], k.shape[1]
        if self.method == Exact():
            return "the layer stays exact"
        if self.steps is not None and self.steps.early:
            return f"one of the first {self.steps.dense} steps"
        if n != m and ring == 1 and not self.cross:  # around a ring, shares may differ in length
            return "cross-attention"
        if min(n, m) * ring < self.min_length:
            return f"shorter than {self.min_length} tokens"
        obstacle = self._obstacle(n, m, given, keys, ring)
        if not isinstance(method, Method) and len(method) != q.shape[2]:
            obstacle = obstacle or f"the plan has no methods for {q.shape[2]} heads"
        if obstacle:
            log_once(self.name, obstacle)
        return obstacle

    def _obstacle(self, n: int, m: int, given: DispatchOptions, keys: Tensor | None, ring: int) -> str:
        if given.mask is not None and keys is None:
            return "the mask says more than padding of keys"
        if given.dropout > 0.0:
            return "attention dropout needs the weights"
        if given.causal and (n != m or self.exact_rows or given.lse):
            return "causal attention across sequences, in parts or beside exact rows"
        if given.lse and not isinstance(self.method, Method):
            return "methods of single heads do not merge their parts around a ring"
        for method in (self.method,) if isinstance(self.method, Method) else self.method:
            if method.self_only and (n != m or ring > 1 or self.exact_rows):
                return f"{type(method).__name__} needs queries and keys that are the same tokens"
            if given.causal and method.causality == "no":
                return f"{type(method).__name__} cannot be causal"
        return ""

    # ------------------------------------------------------------------ over many ranks

    def _over_ring(self, q: Tensor, k: Tensor, v: Tensor, given: DispatchOptions, parallel: Any) -> Method | None:
        """The method that answers around a ring as on one device, over ``clusterattn.parallel``; None where shares are
        to be merged: every reason for that is one that all ranks share, or some would wait for the others forever."""
        ring = parallel.ring_degree
        if ring == 1 or parallel.ulysses_degree > 1 or getattr(parallel, "ring_anything", False):
            return None
        if torch.compiler.is_compiling() or not isinstance(self.method, (Clustered, Auto)):
            return None
        if given.mask is not None or given.causal or q.shape[1] != k.shape[1] or (self.joint and not self.exact_rows):
            return None
        if self._why_exact(q, k, self.method, given, None, ring):
            return None
        (b, n, h, d), (_, m, hk, e) = q.shape, v.shape
        shape = Shape(n * ring, m * ring, d, e, given.causal, h // hk)
        method, reason = chosen(self.method, shape, b * h, q.device, q.dtype)
        alone = isinstance(method, Clustered) and method.share_heads  # which is not made over ranks
        return None if reason or alone else method

    # ------------------------------------------------------------------ a part of a call

    def _forward(
        self,
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _save_ctx: bool = True,
        _parallel_config: Any = None,
    ) -> Answer:
        """All tokens for some heads (Ulysses), or some queries and some keys for all heads (ring)."""
        given, parallel = DispatchOptions(attn_mask, dropout_p, is_causal, scale, return_lse), _parallel_config
        if _save_ctx:
            ctx.save_for_backward(query, key, value)
            ctx.given, ctx.parallel = given, parallel.context_parallel_config
        return self.attend(query, key, value, given, parallel.context_parallel_config)

    def _backward(
        self,
        ctx: Any,
        grad_out: Tensor,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The part is answered again (draws go by a seed: the same answer). Around a ring it was weighed by
        ``exp(lse_part - lse)``, which has a gradient too."""
        if query is None or key is None or value is None:
            query, key, value = ctx.saved_tensors
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        with torch.enable_grad():
            answered = self.attend(q, k, v, ctx.given, ctx.parallel)
        part, part_lse = answered if isinstance(answered, tuple) else (answered, None)
        if part_lse is None or out is None or lse is None:
            return torch.autograd.grad([part], [q, k, v], [grad_out])
        share = (part_lse.detach() - lse).exp().unsqueeze(-1)
        of_weight = (share * (part.detach() - out) * grad_out).sum(-1)
        return torch.autograd.grad([part, part_lse], [q, k, v], [(share * grad_out).to(part.dtype), of_weight.to(lse)])


def _by(
    method: LayerPlan, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, given: DispatchOptions
) -> tuple[Tensor, ...]:
    if given.lse and isinstance(method, Method):
        return answer_with_weight(q, k, v, method, key_mask=keys, scale=given.scale)
    return (answer(q, k, v, method, key_mask=keys, causal=given.causal, scale=given.scale),)


def _key_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """(b m), True = a real key, where the mask says no more than that: bool (b m) or (b 1 1 m)."""
    if mask is None or mask.dtype != torch.bool:
        return None
    if mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1:
        mask = mask[:, 0, 0]
    fits = mask.dim() == 2 and mask.shape[0] in (1, q.shape[0]) and mask.shape[1] == k.shape[1]
    return mask.expand(q.shape[0], -1) if fits else None


def _exact(q: Tensor, k: Tensor, v: Tensor, given: DispatchOptions) -> Answer:
    """SDPA, as the native backend calls it; which has no log-weights to give."""
    mask = given.mask
    if mask is not None and mask.dim() == 2 and mask.shape == (q.shape[0], k.shape[1]):
        mask = mask[:, None, None]
    if not given.lse:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=given.dropout,
            is_causal=given.causal,
            scale=given.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)
    out, lse = attention(
        *(heads_first(x) for x in (q, k, v)),
        method=Exact(),
        attn_mask=mask,
        dropout_p=given.dropout,
        causal=given.causal,
        scale=given.scale,
        return_lse=True,
    )
    return out.transpose(1, 2), lse.transpose(1, 2)
