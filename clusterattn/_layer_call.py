"""One attention call of a model, and how a method, or one method for each head, answers it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._attention import attention
from ._documents import Starts
from ._errors import bad_value
from ._plan import LayerPlan
from ._types import Method


@dataclass(frozen=True)
class LayerCall:
    """What one layer was asked, and what it answered. Shapes and masks as for ``ca.attention``.

    Attributes:
        q: (b h n d)
        k: (b hk m d), heads not repeated
        v: (b hk m e)
        key_mask: (b m), True = a real key
        query_mask: (b n), where it is known
        causal: as in ``ca.attention``
        scale: None: 1/sqrt(d)
        method: the method that answers
        out: (b h n e), the answer
        seed: of the method's draws
        documents: (b n) or cu_seqlens, where a row holds several (in self-attention)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    query_mask: Tensor | None
    causal: bool
    scale: float | None
    method: LayerPlan
    out: Tensor | None = None
    seed: int = 0
    documents: Tensor | Starts | None = None

    def answer(self, method: LayerPlan | None = None) -> Tensor:
        """(b h n e): what the call's method answers, or what another would.

        Args:
            method: another one, or one for each query head; None: the call's own
        """
        asked = self if method is None else replace(self, method=method)
        if self.documents is not None or self.key_mask is None or not self.causal or self.q.shape[2] != self.k.shape[2]:
            return asked._by_head()
        # Causal methods cut positions into blocks: with the padding moved behind the tokens, a padded sequence is cut
        # where it would be alone. Order is kept, so who comes before whom is too.
        at = torch.arange(self.q.shape[2], device=self.q.device)
        first = self.key_mask.int().argmax(-1, keepdim=True)  # (b 1)
        out = asked._at((at + first) % self.q.shape[2])._by_head()
        return _moved(out, (at - first) % self.q.shape[2])

    def _at(self, positions: Tensor) -> LayerCall:
        """The same call with its tokens in another order: positions (b n), for n = m."""
        q, k, v = (_moved(x, positions) for x in (self.q, self.k, self.v))
        keys, queries = (None if row is None else row.gather(1, positions) for row in (self.key_mask, self.query_mask))
        return replace(self, q=q, k=k, v=v, key_mask=keys, query_mask=queries)

    def _by_head(self) -> Tensor:
        if isinstance(self.method, Method):
            return self._whole(self.method, self.q, self.k, self.v)
        h, hk = self.q.shape[1], self.k.shape[1]
        if len(self.method) != h:
            raise bad_value(f"a method for each of {h} query heads", f"{len(self.method)} methods", "one for all heads")
        order: list[int] = []
        answers = []
        for method in dict.fromkeys(self.method):
            mine = [head for head in range(h) if self.method[head] == method]
            keys = _shared_keys(mine, h // hk)
            answers.append(self._whole(method, self.q[:, mine], self.k[:, keys], self.v[:, keys]))
            order += mine
        return torch.cat(answers, 1)[:, [order.index(head) for head in range(h)]]

    def _whole(self, method: Method, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(
            q,
            k,
            v,
            method=method,
            key_mask=self.key_mask,
            query_mask=self.query_mask,
            causal=self.causal,
            documents=self.documents,
            scale=self.scale,
            seed=self.seed,
        )
        return out


def _moved(x: Tensor, positions: Tensor) -> Tensor:
    """The rows of x (b h n d) in the order of positions (b n). Not take_along_dim: compiled, it is one graph per n."""
    return x.gather(2, positions[:, None, :, None].expand(x.shape))


def _shared_keys(heads: list[int], share: int) -> list[int]:
    """The key heads of these query heads, ``share`` query heads to each: as few as can serve them in this order."""
    keys = [head // share for head in heads]
    few = list(dict.fromkeys(keys))
    even = len(heads) // len(few)
    return few if keys == [key for key in few for _ in range(even)] else keys
