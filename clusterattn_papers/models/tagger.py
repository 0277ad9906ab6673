"""A label for every token: the model of the masked copy task."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from clusterattn.methods import MethodSpec

from ._parts import Answer, Positions, Stack

# How far symbols start from zero; positions are 0.7 from it. The copy task is about positions: torch's 1 drowns them,
# and much less than this hides what is to be copied. Both take more steps.
SYMBOLS = 0.3


class Tagger(nn.Module):
    """Embedding, fixed positions, layers by any method, and one linear map that all tokens share.

    symbols   how many different ids come in
    labels    how many different labels come out
    length    the usual length, from which ClusterFormer takes its number of clusters where the method leaves it open
    Other options are ``Stack``'s: feedforward, dropout, …
    """

    def __init__(
        self,
        symbols: int,
        labels: int,
        method: MethodSpec = "refined",
        *,
        dim: int = 192,
        heads: int = 6,
        layers: int = 4,
        length: int = 512,
        **options: Any,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, dim)
        nn.init.normal_(self.embedding.weight, std=SYMBOLS)
        self.positions = Positions(dim)
        self.stack = Stack(method, dim, heads, layers, length=length, **options)
        self.head = nn.Linear(dim, labels)

    def forward(self, ids: Tensor, key_mask: Tensor | None = None) -> Answer:
        """ids (b n); key_mask (b n), True = a real token: logits (b n labels)."""
        x, auxiliary = self.stack(self.positions(self.embedding(ids)), key_mask)
        return Answer(self.head(x), auxiliary)
