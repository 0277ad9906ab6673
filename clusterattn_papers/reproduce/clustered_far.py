"""Clustered attention's Table 1 once more, with joined speech in which models must look far."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from clusterattn._rows import Row

from ..tasks.far_speech import INPUTS, SILENT, BySpeaker, far_speech
from ..tasks.speech import Speech, an4_recordings
from ._experiment import Cell, Context, Table, chosen
from ._speech import INVENTED_PHONES, SpeechConfig, Trained, invented_recordings
from .clustered_speech import TABLE1, ClusteredTable1, common_differences

ABOUT = {
    "speaker": "one speaker's utterances",
    "carrier": "everything twice, with silent stretches in the second half",
}
ONE_RUN = "One run each: which of two is ahead is told by the sign of their difference, and may be chance."
MODELS = ("full", "clustered-100", "improved-100", "refined-100")


@dataclass(frozen=True)
class FarConfig(SpeechConfig):
    """inputs   kinds of ``tasks.far_speech``"""

    inputs: tuple[str, ...] = INPUTS
    trained: tuple[str, ...] = MODELS
    evaluated: tuple[str, ...] = (*MODELS, "oracle-top")


class ClusteredTable1Far(Trained):
    name = "clustered-table1-far"
    place = "Table 1 (far)"
    about = "speech that must be heard far apart: train with one attention, evaluate with another; six layers"
    scales: ClassVar[dict[str, Any]] = {
        "smoke": FarConfig(data=None, seeds=(0,), frames=60, joinings=1, judged=1, layers=1, dim=24, heads=2,
                           feedforward=32, top=4, steps=2, evaluate=1, batch=4, precision="no", seconds=1.0),
        "small": FarConfig(layers=6, steps=3000, seeds=(0,), seconds=200.0),
        "paper": FarConfig(layers=9, steps=None, epochs=200, evaluate=None, batch=10, lr=1e-4, decay="plateau",
                           precision="no", patience=20, seconds=300_000.0),
    }  # fmt: skip

    def cells(self, config: FarConfig) -> list[Cell]:  # type: ignore[override]
        """No paces: time is Table 2's."""
        made = [cell for cell in super().cells(config) if not cell.alone]
        return [
            replace(cell, name=f"{inputs}: {cell.name}", settings={**cell.settings, "inputs": inputs})
            for inputs in config.inputs
            for cell in made
        ]

    def task(self, cell: Cell, config: SpeechConfig, context: Context) -> Speech:
        symbols, by_speaker = INVENTED_PHONES, invented_speakers()
        if config.data is not None:
            symbols, by_speaker = an4_recordings(context.folder(config.data))
        return far_speech(
            cell.settings["inputs"],
            symbols,
            by_speaker,
            frames=config.frames,
            joinings=config.joinings,
            judged=config.judged,
            seed=cell.settings["seed"],
        )

    def tables(self, rows: Sequence[Row], config: FarConfig) -> list[Table]:
        found = []
        for inputs in config.inputs:
            mine = [row for row in rows if row["inputs"] == inputs]
            found += [
                replace(table, title=f"{ABOUT[inputs].capitalize()}: {table.title[0].lower()}{table.title[1:]}")
                for table in ClusteredTable1().tables(mine, config)
            ]
        return found

    def differences(self, config: FarConfig) -> list[str]:
        first, *others = common_differences(config, joined="Utterances are joined to inputs")
        return [
            first,
            "Utterances joined at random give no reason to look far, and then any attention will do. Here inputs are "
            + "; or ".join(ABOUT[inputs] for inputs in config.inputs)
            + f" (about {SILENT:.0%} of it, a fifth of a second at a time), which is to be found in the first.",
            *([ONE_RUN] if len(config.seeds) == 1 else []),
            *others,
        ]

    def findings(self, rows: Sequence[Row], config: FarConfig) -> list[str]:
        lines = []
        theirs = TABLE1["clustered-100", "full"] - TABLE1["full", "full"]
        for inputs in config.inputs:
            mine = [row for row in rows if row["inputs"] == inputs]
            full, clustered = (chosen(mine, "dev", trained="full", evaluated=name) for name in MODELS[:2])
            if full and clustered:
                cost = 100 * (statistics.fmean(clustered) - statistics.fmean(full))
                lines.append(
                    f"{ABOUT[inputs].capitalize()}: clustered-100 in the place of full costs a model trained with full "
                    f"{cost:+.1f} points (the paper's {theirs:+.1f})."
                )
            lines += [f"{ABOUT[inputs].capitalize()}: {line}" for line in ClusteredTable1().findings(mine, config)]
        return lines


def invented_speakers() -> BySpeaker:
    spoken = [(f"speaker {at % 2}", each) for at, each in enumerate(invented_recordings())]
    return {"train": spoken[:16], "dev": spoken[16:20], "test": spoken[20:]}


EXPERIMENTS: list[Any] = [ClusteredTable1Far]
