"""A masked language model, and the same body with a head for another task."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from clusterattn.methods import MethodSpec

from ._parts import Answer, Positions, Stack


class Guesses(NamedTuple):
    """What a masked language model returns."""

    logits: Tensor  # (b p words) for the tokens it was asked for
    follows: Tensor  # (b 2): 1 where the second text follows the first
    auxiliary: Tensor  # as in Answer


class Body(nn.Module):
    """Tokens of one or two texts (b n) -> (b n dim), and the method's own loss.

    length   the tokens of a whole input: near its root lies ClusterFormer's number of clusters, where left open
    """

    def __init__(
        self,
        vocabulary: int,
        method: MethodSpec,
        *,
        dim: int = 256,
        heads: int = 4,
        layers: int = 4,
        length: int = 128,
        dropout: float = 0.1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(vocabulary, dim), nn.Embedding(2, dim)
        for table in (self.words, self.kinds):
            nn.init.normal_(table.weight, std=dim**-0.5)
        self.positions, self.norm, self.dropout = Positions(dim), nn.LayerNorm(dim), nn.Dropout(dropout)
        self.stack = Stack(method, dim, heads, layers, length=length, dropout=dropout, **options)

    def forward(self, tokens: Tensor, key_mask: Tensor | None, kinds: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """kinds (b n): 0 in the first text, 1 in the second."""
        x = self.words(tokens) * self.words.embedding_dim**0.5
        if kinds is not None:
            x = x + self.kinds(kinds) * self.words.embedding_dim**0.5
        hidden: tuple[Tensor, Tensor] = self.stack(self.dropout(self.norm(self.positions(x))), key_mask)
        return hidden


class MaskedLM(nn.Module):
    """Guesses tokens that were hidden, and whether the second text follows the first. Options as for ``Body``."""

    def __init__(self, vocabulary: int, method: MethodSpec, *, dim: int = 256, **options: Any) -> None:
        super().__init__()
        self.body = Body(vocabulary, method, dim=dim, **options)
        self.think = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.bias = nn.Parameter(self.body.words.weight.new_zeros(vocabulary))
        self.follows = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 2))

    def forward(self, tokens: Tensor, key_mask: Tensor | None, kinds: Tensor | None, asked: Tensor) -> Guesses:
        """tokens, key_mask, kinds (b n); asked (b p): the positions to guess at. Only their logits are made."""
        hidden, auxiliary = self.body(tokens, key_mask, kinds)
        there = hidden.gather(1, asked.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        logits = nn.functional.linear(self.think(there), self.body.words.weight, self.bias)
        return Guesses(logits, self.follows(hidden[:, 0]), auxiliary)


class Tuned(nn.Module):
    """A body, pretrained or not, with a fresh head on the first token."""

    def __init__(self, body: Body, labels: int, dropout: float = 0.1) -> None:
        super().__init__()
        dim = body.words.embedding_dim
        self.body = body
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Dropout(dropout), nn.Linear(dim, labels))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Answer:
        """Under the names of tokenizers: tokens, True = real, which text."""
        hidden, auxiliary = self.body(input_ids, attention_mask, token_type_ids)
        return Answer(self.head(hidden[:, 0]), auxiliary)
