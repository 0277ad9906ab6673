"""Joined speech that must be heard far apart: one speaker's, or with a second half that only the first explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from clusterattn._errors import check_choice

from .speech import Joined, Recording, Speech, joined

INPUTS = ("speaker", "carrier")
STRETCH = 20  # frames that are silent together
SILENT = 0.4  # of the stretches of the second half

BySpeaker = Mapping[str, Sequence[tuple[str, Recording]]]  # by split


class Echoed(Sequence[Recording]):
    """Every recording twice, one after the other; in the second half stretches are silent, so that what is said there
    can be known from the first half alone. Which ones follows from the place of the recording and the seed."""

    def __init__(self, recordings: Sequence[Recording], seed: int = 0, silent: float = SILENT) -> None:
        self.recordings, self.seed, self.silent = recordings, seed, silent

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, at: Any) -> Any:
        frames, symbols = self.recordings[at]
        dice = torch.Generator().manual_seed(self.seed * len(self) + at)
        off = torch.rand(-(-len(frames) // STRETCH), generator=dice) < self.silent
        hidden = off.repeat_interleave(STRETCH)[: len(frames)].unsqueeze(1)
        return Recording(torch.cat([frames, frames.masked_fill(hidden, 0.0)]), torch.cat([symbols, symbols]))


def joined_within(spoken: Sequence[tuple[str, Recording]], frames: int, times: int, seed: int) -> Joined:
    """As ``joined``, but no input has two speakers."""
    recordings = [each for _, each in spoken]
    groups: list[list[int]] = []
    for number, speaker in enumerate(sorted({name for name, _ in spoken})):
        mine = [at for at, (name, _) in enumerate(spoken) if name == speaker]
        found = joined([recordings[at] for at in mine], frames, times, seed * len(spoken) + number)
        groups += [[mine[at] for at in group] for group in found.groups]
    return Joined(recordings, groups)


def far_speech(
    inputs: str,
    symbols: Sequence[str],
    by_speaker: BySpeaker,
    *,
    frames: int = 780,
    joinings: int = 1,
    judged: int = 1,
    seed: int = 0,
) -> Speech:
    """inputs   "speaker": utterances of one speaker, joined. "carrier": utterances of anybody, joined, and then again
                with silent stretches: the start carries what the end needs
    frames      mean of an input; the other arguments as for ``Speech.an4``"""
    check_choice("far_speech", "inputs", inputs, INPUTS)
    splits: dict[str, Sequence[Recording]] = {}
    for split, spoken in by_speaker.items():
        times, mine = (joinings, seed) if split == "train" else (judged, 0)
        if inputs == "speaker":
            found = joined_within(spoken, frames, times, mine)
        else:
            found = joined([each for _, each in spoken], frames // 2, times, mine)
        found = found if split == "train" else found.by_length()
        splits[split] = found if inputs == "speaker" else Echoed(found, mine)
    features = next(iter(by_speaker["train"]))[1].frames.shape[1]
    return Speech(splits, symbols, features=features, length=frames)
