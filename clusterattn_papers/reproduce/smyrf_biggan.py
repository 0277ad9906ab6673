"""SMYRF's rebuttal: the attention block of BigGAN with 16K tokens, timed and held against exact attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from clusterattn._rows import Row
from clusterattn.measure.bench import PASSES, pass_of, pass_through
from clusterattn.measure.error import exact_answer, relative_error
from clusterattn.measure.sample import Sample
from clusterattn.measure.speed import Run, first_line, peak_memory, timed

from ._experiment import Cell, Context, Experiment, Table, chosen, pinned, spread


@dataclass(frozen=True)
class Block:
    """BigGAN's attention over side × side pixels, keys pooled 2 × 2: channels / 8 for q and k, channels / 2 for v."""

    side: int = 128
    channels: int = 128
    batch: int = 8
    sharpness: tuple[float, ...] = (1.0, 4.0)  # standard deviation of the logits
    dtype: str = "bfloat16"
    seconds: float = 0.2
    clusters: int = 100
    top: int = 64

    @property
    def methods(self) -> dict[str, str]:
        n = self.side**2
        few = f"clusters={self.clusters}"

        def buckets(rounds: int, count: int) -> tuple[str, str]:
            seats = f"q_seats={n // count},k_seats={n // 4 // count}"
            return f"smyrf {rounds} × {n // count}", f"smyrf:rounds={rounds},{seats}"

        return dict(
            [
                buckets(4, 8),
                buckets(4, 32),
                buckets(8, 64),
                (f"clustered-{self.clusters}", f"clustered:{few}"),
                (f"improved-{self.clusters}, top {self.top}", f"improved:{few},top={self.top}"),
                (f"refined-{self.clusters}, top {self.top}", f"refined:{few},top={self.top}"),
            ]
        )


PLAIN, SDPA = "plain (as BigGAN's code)", "sdpa"


class BigGan(Experiment):
    name: ClassVar[str] = "smyrf-biggan"
    place: ClassVar[str] = "BigGAN with 16K tokens"
    about: ClassVar[str] = "BigGAN's attention block, 16 384 queries × 4 096 pooled keys: time, memory, error"
    scales: ClassVar[dict[str, Block]] = {
        "smoke": Block(side=16, channels=32, batch=1, sharpness=(2.0,), dtype="float32", seconds=0, clusters=6, top=6),
        "small": Block(),
        "paper": Block(batch=64),
    }

    def cells(self, config: Block) -> list[Cell]:
        return [Cell(f"logits of spread {sharp:g}", {"sharpness": sharp}, 60, alone=True) for sharp in config.sharpness]

    def run(self, cell: Cell, config: Block, context: Context) -> list[Row]:
        dtype: torch.dtype = getattr(torch, config.dtype)
        sample = picture_like(config, cell.settings["sharpness"]).to(context.device, dtype)
        at = torch.linspace(0, sample.q.shape[2] - 1, min(512, sample.q.shape[2])).long().to(context.device)
        exact = exact_answer(sample.q[:1, :, at], sample.k[:1], sample.v[:1])
        rows: list[Row] = []
        for name in (PLAIN, SDPA, *config.methods):
            for which in PASSES:
                context.tick(f"{name}, {which}", (2 + len(config.methods)) * len(PASSES), len(rows))
                row: Row = {"method": name, "settings": config.methods.get(name, ""), "pass": which}
                try:
                    row |= self._measured(name, sample, config, which == PASSES[1], context, at, exact)
                except Exception as error:  # out of memory, or what a kernel throws: the other rows are worth having
                    row["failed"] = first_line(error)
                rows.append(row)
        return rows

    @staticmethod
    def _measured(
        name: str, sample: Sample, config: Block, backward: bool, context: Context, at: Tensor, exact: Tensor
    ) -> Row:
        run = run_of(name, sample, config, backward)
        answer = run()  # compiles, where something must be
        took = timed(run, context.device, seconds=config.seconds)
        row: Row = {"seconds": took.seconds, "eager_seconds": took.eager}
        row["memory_bytes"] = peak_memory(run, context.device)
        if not backward:
            assert isinstance(answer, Tensor)
            row["error"] = relative_error(answer[:1, :, at], exact)
        return row

    def tables(self, rows: Sequence[Row], config: Block) -> list[Table]:
        n = config.side**2
        table = Table(
            f"{config.batch} images, {n} queries × {n // 4} keys, one head, q and k × {config.channels // 8}, v × "
            f"{config.channels // 2}, {config.dtype}",
            [
                "attention",
                *(f"{which}, ms" for which in PASSES),
                *(f"{which}, MiB" for which in PASSES),
                *(f"error, logits of spread {sharp:g}" for sharp in config.sharpness),
            ],
        )
        for name in (PLAIN, SDPA, *config.methods):
            first = [row for row in rows if row["method"] == name and row["sharpness"] == config.sharpness[0]]
            times = [spread(chosen(first, "seconds", **{"pass": which}), 2, 1e3) for which in PASSES]
            held = [spread(chosen(first, "memory_bytes", **{"pass": which}), 1, 2**-20) for which in PASSES]
            errors = [spread(chosen(rows, "error", method=name, sharpness=sharp), 4) for sharp in config.sharpness]
            failed = [row["failed"][:60] for row in first if "failed" in row]
            table.rows.append([name + (f" (failed: {failed[0]})" if failed else ""), *times, *held, *errors])
        table.notes.append(
            "Time: the fastest of several, as a CUDA graph where there is one. Memory: the peak above the inputs. "
            "Error: relative, against exact attention in fp64, of 512 queries."
        )
        return [table]

    def differences(self, config: Block) -> list[str]:
        return [
            "The block alone, not a GAN: features are random fields with as much at every scale, like pictures have, "
            "through random projections. The rebuttal only says that BigGAN was trained with 16K tokens; it has no "
            "figures for the block.",
            f"{config.channels} channels are ours. How sharp a trained block looks is not known, hence "
            f"{' and '.join(f'{sharp:g}' for sharp in config.sharpness)} as the spread of its logits.",
            "For sdpa q and k are filled up with zeros to the width of v, which lets its fast kernels serve; that is "
            "timed too.",
        ]

    def findings(self, rows: Sequence[Row], config: Block) -> list[str]:
        lines = []
        for sharp in config.sharpness:
            alike = [row for row in rows if row["sharpness"] == sharp and row["pass"] == PASSES[0] and "error" in row]
            peer = chosen(alike, "seconds", method=SDPA)
            ours = [row for row in alike if row["method"] in config.methods]
            ours.sort(key=lambda row: float(row["error"]))
            if ours and peer:
                words = ", ".join(
                    f"{row['method']} error {row['error']:.3f} at {peer[0] / row['seconds']:.2f} × the speed"
                    for row in ours
                )
                lines.append(f"Logits of spread {sharp:g}, forward, against sdpa: {words}.")
        return lines


def picture_like(config: Block, sharpness: float, seed: int = 0) -> Sample:
    """q, k, v of random features that look like pictures: noise of every scale, each as strong as the next."""
    dice = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice)

    side, b, channels = config.side, config.batch, config.channels
    features = torch.zeros(b, channels, side, side)
    size = 2
    while size <= side:
        features += F.interpolate(noise(b, channels, size, size), (side, side), mode="bilinear", align_corners=False)
        size *= 2

    def projected(width: int) -> Tensor:
        return F.conv2d(features, noise(width, channels, 1, 1) / channels**0.5)

    def rows(x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2).unsqueeze(1).contiguous()  # (b 1 n width)

    d = channels // 8
    q, k = rows(projected(d)), rows(F.max_pool2d(projected(d), 2))
    v = rows(F.max_pool2d(projected(channels // 2), 2))
    logits = q[:1, :, :: max(side // 8, 1)] @ k[:1].mT * d**-0.5
    return Sample(q * (sharpness / logits.std(-1).mean()), k, v, source="random fields")


def run_of(name: str, sample: Sample, config: Block, backward: bool) -> Run:
    """One call, ready to be timed. The two exact ones take the same q, k, v."""
    if name in config.methods:
        return pass_of(sample, pinned(config.methods[name]), backward=backward)
    scale = sample.q.shape[-1] ** -0.5

    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if name == PLAIN:
            return torch.softmax(q @ k.mT * scale, -1) @ v
        wider = v.shape[-1] - q.shape[-1]
        out: Tensor = F.scaled_dot_product_attention(F.pad(q, (0, wider)), F.pad(k, (0, wider)), v, scale=scale)
        return out

    return pass_through(sample, answer, backward)


EXPERIMENTS = (BigGan,)
