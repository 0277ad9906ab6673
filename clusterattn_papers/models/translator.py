"""Encoder and decoder over one vocabulary, and the search for the best sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value, check_whole
from clusterattn.methods import MethodSpec
from clusterattn.nn.decoder import Decoder

from ._parts import Answer, Positions, Stack, attentions

NEVER = float("-inf")


class Translator(nn.Module):
    """Source tokens to target tokens, with one table for both embeddings and the output.

    layers           of the encoder, and of the decoder where decoder_layers is not given
    length           for ClusterFormer: near its root lies the number of clusters, where the method leaves it open
    padding, start   tokens that are never written
    end              the token that ends a sentence
    """

    def __init__(
        self,
        vocabulary: int,
        method: MethodSpec,
        *,
        dim: int = 256,
        heads: int = 4,
        layers: int = 3,
        decoder_layers: int | None = None,
        feedforward: int | None = None,
        dropout: float = 0.1,
        length: int = 64,
        padding: int = 0,
        start: int = 1,
        end: int = 2,
        **options: Any,
    ) -> None:
        super().__init__()
        self.padding, self.start, self.end = padding, start, end
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.positions, self.dropout = Positions(dim), nn.Dropout(dropout)
        shared: dict[str, Any] = {"feedforward": feedforward, "dropout": dropout, "length": length, **options}
        self.encoder = Stack(method, dim, heads, layers, **shared)
        self.decoder = Decoder(dim, heads, layers if decoder_layers is None else decoder_layers, method, **shared)

    @property
    def strict(self) -> bool:
        """Does no later token of a target change what is said of an earlier one?"""
        return all(each.method.causality == "strict" for each in attentions(self.decoder) if each.causal)

    def forward(self, source: Tensor, source_mask: Tensor, target: Tensor, target_mask: Tensor | None = None) -> Answer:
        """source (b m) and target (b n), which begins with ``start``; masks True = a real token. Logits (b n words)
        of the token after each."""
        memory, of_encoder = self.encode(source, source_mask)
        hidden, of_decoder = self.decoder(self._embedded(target), memory, target_mask, source_mask)
        return Answer(self._logits(hidden), of_encoder + of_decoder)

    def surprise(self, source: Tensor, source_mask: Tensor, target: Tensor, wanted: Tensor, ignored: int) -> Tensor:
        """-log p of each wanted token (b n) after the prefix of the target that ends before it, and nothing else: what
        a search sees. ``forward`` shows value-causal methods the whole target, whose later tokens have a say in the
        groups. 0 where wanted is ``ignored``. As many decodings as there are tokens."""
        memory, _ = self.encode(source, source_mask)
        found = []
        for at in range(1, target.shape[1] + 1):
            hidden, _ = self.decoder(self._embedded(target[:, :at]), memory, None, source_mask)
            logits = self._logits(hidden[:, -1]).float()
            found.append(nn.functional.cross_entropy(logits, wanted[:, at - 1], ignore_index=ignored, reduction="none"))
        return torch.stack(found, 1)

    def encode(self, source: Tensor, source_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        memory: tuple[Tensor, Tensor] = self.encoder(self._embedded(source), source_mask)
        return memory

    def translate(
        self, source: Tensor, source_mask: Tensor, *, beam: int = 4, penalty: float = 1.0, longest: int | None = None
    ) -> list[list[int]]:
        """Token lists without start and end. A sentence may take one and a half times its source and 10 tokens more,
        unless ``longest`` says otherwise. The decoder reads the whole prefix again for every token."""
        memory, _ = self.encode(source, source_mask)
        memory, mask = memory.repeat_interleave(beam, 0), source_mask.repeat_interleave(beam, 0)

        def after(prefix: Tensor) -> Tensor:
            hidden, _ = self.decoder(self._embedded(prefix), memory, None, mask)
            logits = self._logits(hidden[:, -1]).float()
            logits[:, [self.padding, self.start]] = NEVER
            return logits.log_softmax(-1)

        limit = source_mask.sum(1) * 3 // 2 + 10 if longest is None else torch.full_like(source[:, 0], longest)
        return beam_search(after, limit, start=self.start, end=self.end, beam=beam, penalty=penalty)

    def _embedded(self, tokens: Tensor) -> Tensor:
        scale = math.sqrt(self.embedding.embedding_dim)
        x: Tensor = self.dropout(self.positions(self.embedding(tokens) * scale))
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.embedding.weight)


def beam_search(
    after: Callable[[Tensor], Tensor], limit: Tensor, *, start: int, end: int, beam: int = 4, penalty: float = 1.0
) -> list[list[int]]:
    """The best sentence for each of b sources, as tokens between start and end.

    after     prefixes (b·beam n), the beams of a source one after another -> log-probabilities (b·beam words) of the
              next token
    limit     (b) how many tokens each may have, end included: there it must end
    penalty   hypotheses are compared by log-probability / tokens ** penalty

    A hypothesis is finished when its end is among the ``beam`` best continuations; a source when it has ``beam``
    finished ones and no live one is ahead of the best of them. With one beam this is the greedy choice.
    """
    check_whole("beam_search", beam=beam)
    if len(limit) and int(limit.min()) < 1:
        raise bad_value("room for at least one token in every sentence", f"limit={limit.tolist()}", "longest=1 or more")
    b, device = len(limit), limit.device
    prefix = torch.full((b * beam, 1), start, device=device)
    score = torch.full((b, beam), NEVER, device=device)
    score[:, 0] = 0.0  # the beams begin as one
    finished, done = torch.zeros_like(limit), torch.zeros_like(limit, dtype=torch.bool)
    best = torch.full((b,), NEVER, device=device)
    found = torch.full((b, int(limit.max()) if b else 0), end, device=device)
    for at in range(found.shape[1]):
        scores = after(prefix)
        words = scores.shape[-1]
        scores = (score.view(-1, 1) + scores).view(b, beam, words)
        last = (limit == at + 1).view(-1, 1, 1) & (torch.arange(words, device=device) != end)
        values, where = scores.masked_fill(last, NEVER).flatten(1).topk(min(2 * beam, beam * words), -1)
        origin, token = where // words, where % words
        ends = token == end
        # finish: the best of those that end here, if it beats what was finished before
        now = values[:, :beam].masked_fill(~ends[:, :beam], NEVER) / (at + 1) ** penalty
        now = now.masked_fill(done.unsqueeze(1), NEVER)
        top, which = now.max(-1)
        better = top > best
        best = torch.where(better, top, best)
        mine = prefix.view(b, beam, -1)[torch.arange(b, device=device), origin.gather(1, which.unsqueeze(1)).squeeze(1)]
        line = torch.full_like(found, end)
        line[:, :at] = mine[:, 1:]
        found = torch.where(better.unsqueeze(1), line, found)
        finished = finished + (now > NEVER).sum(-1)
        # go on: the best ``beam`` that do not end; 2 · beam candidates hold as many, since each beam ends but once
        score, kept = values.masked_fill(ends, NEVER).topk(beam, -1)
        ahead = score[:, 0] / (at + 1) ** penalty > best
        done = done | (limit == at + 1) | ((finished >= beam) & ~ahead)
        if bool(done.all()):
            break
        rows = (origin.gather(1, kept) + torch.arange(b, device=device).unsqueeze(1) * beam).flatten()
        prefix = torch.cat([prefix[rows], token.gather(1, kept).view(-1, 1)], 1)
    return [[token for token in line if token != end] for line in found.tolist()]
