"""Texts and pairs of texts to classes: words, positions, attention by any method, the mean."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clusterattn.methods import MethodSpec

from ._parts import Answer, Positions, Stack, mean_over


class Reader(nn.Module):
    """Word numbers (b n) to one vector for each text (b dim).

    start           (words x) word vectors to begin with; where x is not dim a linear map leads there
    words_dropout   on the word vectors: what keeps small data sets from being learned by heart
    """

    def __init__(
        self,
        words: int,
        method: MethodSpec,
        *,
        dim: int,
        heads: int,
        layers: int,
        length: int,
        dropout: float,
        words_dropout: float,
        start: Tensor | None,
        **options: Any,
    ) -> None:
        super().__init__()
        width = dim if start is None else start.shape[1]
        self.words = nn.Embedding(words, width, padding_idx=0)
        with torch.no_grad():
            if start is None:
                nn.init.normal_(self.words.weight)[0] = 0
            else:
                self.words.weight.copy_(start)
        self.widen = nn.Identity() if width == dim else nn.Linear(width, dim)
        self.norm, self.positions = nn.LayerNorm(dim), Positions(dim)
        self.dropout = nn.Dropout(words_dropout)
        self.stack = Stack(method, dim, heads, layers, length=length, dropout=dropout, **options)

    def forward(self, tokens: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.widen(self.dropout(self.words(tokens))))
        x, auxiliary = self.stack(self.positions(x), key_mask)
        return mean_over(x, key_mask), auxiliary


class Classifier(nn.Module):
    """One text, one label."""

    def __init__(
        self,
        words: int,
        classes: int,
        method: MethodSpec = "refined",
        *,
        dim: int = 128,
        heads: int = 4,
        layers: int = 2,
        length: int = 512,
        dropout: float = 0.1,
        words_dropout: float = 0.3,
        start: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.reader = Reader(
            words,
            method,
            dim=dim,
            heads=heads,
            layers=layers,
            length=length,
            dropout=dropout,
            words_dropout=words_dropout,
            start=start,
            **options,
        )
        self.head = nn.Sequential(nn.Dropout(words_dropout), nn.Linear(dim, classes))

    def forward(self, tokens: Tensor, key_mask: Tensor) -> Answer:
        """tokens (b n), key_mask (b n) True = a real word."""
        text, auxiliary = self.reader(tokens, key_mask)
        return Answer(self.head(text), auxiliary)


class PairClassifier(nn.Module):
    """Two texts, one label: both read by the same reader, then compared."""

    def __init__(
        self,
        words: int,
        classes: int,
        method: MethodSpec = "refined",
        *,
        dim: int = 192,
        heads: int = 6,
        layers: int = 1,
        length: int = 64,
        dropout: float = 0.1,
        words_dropout: float = 0.3,
        start: Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.reader = Reader(
            words,
            method,
            dim=dim,
            heads=heads,
            layers=layers,
            length=length,
            dropout=dropout,
            words_dropout=words_dropout,
            start=start,
            **options,
        )
        self.head = nn.Sequential(
            nn.Dropout(words_dropout),
            nn.Linear(4 * dim, dim),
            nn.GELU(),
            nn.Dropout(words_dropout),
            nn.Linear(dim, classes),
        )

    def forward(self, tokens: Tensor, key_mask: Tensor) -> Answer:
        """tokens (b 2 n), key_mask (b 2 n) True = a real word."""
        texts, auxiliary = self.reader(tokens.flatten(0, 1), key_mask.flatten(0, 1))
        one, other = texts.unflatten(0, (-1, 2)).unbind(1)
        return Answer(self.head(torch.cat([one, other, (one - other).abs(), one * other], -1)), auxiliary)
