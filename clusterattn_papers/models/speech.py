"""An acoustic encoder for CTC: frames of speech to log-odds of symbols, by any method."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from clusterattn._errors import check_whole
from clusterattn.methods import MethodSpec

from ._parts import Answer, Positions, Stack

PER_SYMBOL = 15  # frames to a symbol, roughly, in speech at 100 frames a second


class SpeechEncoder(nn.Module):
    """Frames (b n features) -> ``Answer`` with logits (b n symbols + 1); the last column is CTC's blank.

    reach      frames on each side that a frame's first projection sees: 0 is a plain linear layer, as published
    hidden     share of bands (and of short stretches of time) that training hides, as SpecAugment does; 0 hides nothing
    shared_qk  one projection for queries and keys: the papers' shared-full
    and the options of ``Stack``: feedforward, dropout, ...
    """

    def __init__(
        self,
        method: MethodSpec,
        features: int,
        symbols: int,
        *,
        dim: int = 192,
        heads: int = 6,
        layers: int = 6,
        feedforward: int = 768,
        dropout: float = 0.1,
        reach: int = 0,
        hidden: float = 0.0,
        shared_qk: bool = False,
        length: int = 800,
        **options: Any,
    ) -> None:
        super().__init__()
        check_whole("SpeechEncoder", features=features, symbols=symbols, dim=dim)
        self.enter = nn.Conv1d(features, dim, 2 * reach + 1, padding=reach)
        self.positions, self.dropout, self.hidden = Positions(dim), nn.Dropout(dropout), hidden
        self.stack = Stack(
            method,
            dim,
            heads,
            layers,
            length=length,
            feedforward=feedforward,
            dropout=dropout,
            shared_qk=shared_qk,
            **options,
        )
        self.leave = nn.Linear(dim, symbols + 1)
        with torch.no_grad():  # most frames say nothing: CTC learns that first, and slowly
            self.leave.bias[-1] = math.log(symbols * PER_SYMBOL)

    def forward(self, frames: Tensor, mask: Tensor) -> Answer:
        """mask (b n): True where a frame is real."""
        if self.training and self.hidden:
            frames = hide(frames, self.hidden)
        frames = frames.masked_fill(~mask.unsqueeze(-1), 0.0)
        x = self.enter(frames.transpose(1, 2)).transpose(1, 2)
        x, auxiliary = self.stack(self.dropout(self.positions(x)), mask)
        return Answer(self.leave(x), auxiliary)


STRETCH = 20  # frames hidden together: a fifth of a second


def hide(frames: Tensor, share: float) -> Tensor:
    """Zero (which is the mean) in about ``share`` of the stretches of time, and one run of bands up to that share."""
    b, n, bands = frames.shape
    device = frames.device
    silent = torch.rand(b, -(-n // STRETCH), 1, device=device) < share
    silent = silent.repeat_interleave(STRETCH, 1)[:, :n]
    width = torch.rand(b, 1, 1, device=device) * share * 2 * bands
    first = torch.rand(b, 1, 1, device=device) * (bands - width).clamp(min=0)
    band = torch.arange(bands, device=device)
    return frames.masked_fill(silent | (band >= first) & (band < first + width), 0.0)
