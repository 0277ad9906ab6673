"""Exact attention over many ranks in its three usual ways, on torch.distributed, with a count of what one rank sends.

Each is the real exchange, forward and backward. ``attend`` makes the answers; without it nothing is computed and the
same messages go out with zeros in them: bytes do not depend on what is in a message, and N² scores take their time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import clusterattn as ca

Answer = tuple[Tensor, Tensor]  # (b h n e) and the log-weight (b h n)


@dataclass
class Wire:
    """Messages between the ranks, counted: bytes that this rank sends, and steps that wait for one another."""

    sent: int = 0
    steps: int = 0

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def _count(self, sent: int, steps: int) -> None:
        self.sent, self.steps = self.sent + sent, self.steps + steps

    def shift(self, x: Tensor) -> Tensor:
        """To the next rank, from the one before."""
        mine, there = dist.get_rank(), torch.empty_like(x)
        sends = dist.P2POp(dist.isend, x.contiguous(), (mine + 1) % self.ranks)
        receives = dist.P2POp(dist.irecv, there, (mine - 1) % self.ranks)
        for each in dist.batch_isend_irecv([sends, receives]):
            each.wait()
        self._count(x.nbytes, 1)
        return there

    def gather(self, x: Tensor) -> list[Tensor]:
        found = [torch.empty_like(x) for _ in range(self.ranks)]
        dist.all_gather(found, x.contiguous())
        self._count((self.ranks - 1) * x.nbytes, self.ranks - 1)
        return found

    def exchange(self, parts: list[Tensor]) -> list[Tensor]:
        """parts[r] to rank r; what the ranks sent to this one."""
        sent = torch.stack(parts)
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent)
        self._count((self.ranks - 1) * parts[0].nbytes, self.ranks - 1)
        return list(found)


def exactly(q: Tensor, k: Tensor, v: Tensor) -> Answer:
    out, lse = ca.attention(q, k, v, method="exact", return_lse=True)
    return out, lse


Attend = Callable[[Tensor, Tensor, Tensor], Answer] | None


def _part(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Answer:
    return attend(q, k, v) if attend else (torch.zeros_like(q), q[..., 0])


def _gradients(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor
) -> tuple[Tensor, ...]:
    """Of q, k and v by the part of the answer that these keys gave: it was weighed by exp(lse of the part - lse)."""
    if attend is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    part, level = attend(*leaves)
    share = (level.detach() - lse).exp().unsqueeze(-1)
    of_weight = (share * (part.detach() - out) * d_out).sum(-1)
    return torch.autograd.grad([part, level], leaves, [share * d_out, of_weight])


def ring(wire: Wire, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, attend: Attend) -> list[Tensor]:
    """Keys and values go round; backward again, with their gradients."""
    out, lse = _part(attend, q, k, v)
    both = torch.stack([k, v])
    for _ in range(wire.ranks - 1):
        both = wire.shift(both)
        part, level = _part(attend, q, both[0], both[1])
        whole = torch.logaddexp(lse, level)
        out = out * (lse - whole).exp().unsqueeze(-1) + part * (level - whole).exp().unsqueeze(-1)
        lse = whole
    forward = wire.sent
    both, d_both, d_q = torch.stack([k, v]), torch.zeros_like(torch.stack([k, v])), torch.zeros_like(q)
    for turn in range(wire.ranks):
        more = _gradients(attend, q, both[0], both[1], out, lse, d_out)
        d_q, d_both = d_q + more[0], d_both + torch.stack(more[1:])
        if turn < wire.ranks - 1:
            both = wire.shift(both)
        d_both = wire.shift(d_both)  # after as many turns as there are ranks it is at home
    return [out, d_q, d_both[0], d_both[1], torch.tensor(forward)]


def all_gather(wire: Wire, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, attend: Attend) -> list[Tensor]:
    """Keys and values to everybody; backward: again, and their gradients back to their owners."""

    def everything() -> tuple[Tensor, Tensor]:
        found = wire.gather(torch.stack([k, v]))
        return torch.cat([each[0] for each in found], 2), torch.cat([each[1] for each in found], 2)

    out, lse = _part(attend, q, *everything())
    forward = wire.sent
    keys, values = everything()
    d_q, d_keys, d_values = _gradients(attend, q, keys, values, out, lse, d_out)
    theirs = torch.stack([d_keys, d_values]).chunk(wire.ranks, 3)
    d_k, d_v = torch.stack(wire.exchange([each.contiguous() for each in theirs])).sum(0)
    return [out, d_q, d_k, d_v, torch.tensor(forward)]


def ulysses(wire: Wire, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, attend: Attend) -> list[Tensor]:
    """From shares of tokens to shares of heads and back; needs as many heads for each rank."""

    def to_heads(x: Tensor) -> Tensor:
        return torch.cat(wire.exchange([each.contiguous() for each in x.chunk(wire.ranks, 1)]), 2)

    def to_tokens(x: Tensor) -> Tensor:
        return torch.cat(wire.exchange([each.contiguous() for each in x.chunk(wire.ranks, 2)]), 1)

    leaves = [to_heads(x) for x in (q, k, v)]
    out, lse = _part(attend, *leaves)
    answer = to_tokens(out)
    forward = wire.sent
    grads = _gradients(attend, *leaves, out, lse, to_heads(d_out))
    return [answer, *(to_tokens(x) for x in grads), torch.tensor(forward)]


PEERS = {"ring": ring, "all-gather": all_gather, "Ulysses": ulysses}
