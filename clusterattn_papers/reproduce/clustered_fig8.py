"""Clustered attention, Figure 8: where the tokens of a question look, by full attention and by what replaces it."""

from __future__ import annotations

import base64
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clusterattn import attention_matrix
from clusterattn._extras import need
from clusterattn._rows import Row
from clusterattn.measure.error import row_l1
from clusterattn.measure.plots import as_png, canvas, rules, short, weight_bar
from clusterattn.measure.reading import spread as evenly

from ..models.pretrained import encoder, tiny, tokenizer
from ..tasks.files import folder_of
from ..tasks.glue import INVENTED, weights_of
from ._experiment import Cell, Context, Experiment, Table, chosen, pinned, spread

FULL = "full"
LEAST = 4  # decades of weight that a map holds: anything below 10⁻⁴ is drawn as that
NAMED, ABOVE = 3, 0.05  # beside each row: so many keys at most, each of so much weight at least


@dataclass(frozen=True)
class MapsConfig:
    model: str = "all-MiniLM-L6-v2"
    clusters: int = 25
    top: int = 32
    longest: int = 160  # tokens of the pair that is drawn, so that they can be read
    questions: int = 100  # for the figures behind the picture
    length: int = 384

    @property
    def methods(self) -> dict[str, str]:
        few = f"clusters={self.clusters}"
        return {
            FULL: "exact",
            "improved": f"improved:{few},top={self.top}",
            "clustered": f"clustered:{few}",
            "refined": f"refined:{few},top={self.top}",
        }


class Asked(NamedTuple):
    question: str
    paragraph: str
    answer: str


class Looked(NamedTuple):
    """One layer's queries and keys for a pair, and which tokens are the question's and the paragraph's."""

    layer: int
    q: Tensor  # (1 h n d)
    k: Tensor
    scale: float | None
    asking: Tensor  # (n,) bool
    telling: Tensor

    def weights(self, method: str) -> Tensor:
        """(h asking n)"""
        found = attention_matrix(self.q, self.k, method=pinned(method), scale=self.scale, backend="reference")
        return found[0][:, self.asking].float()


class ClusteredFig8(Experiment):
    name: ClassVar[str] = "clustered-fig8"
    place: ClassVar[str] = "Figure 8"
    about: ClassVar[str] = "attention maps of a question about a paragraph: full, improved, clustered, refined"
    needs: ClassVar[tuple[str, ...]] = ("xquad-en",)
    scales: ClassVar[dict[str, MapsConfig]] = {
        "smoke": MapsConfig(model="tiny", clusters=4, top=6, questions=2, length=64),
        "small": MapsConfig(),
        "paper": MapsConfig(model="FacebookAI/roberta-base"),
    }

    def cells(self, config: MapsConfig) -> list[Cell]:
        return [Cell("maps", {"what": "maps"}, 20), Cell("agreement", {"what": "agreement"}, 60)]

    def run(self, cell: Cell, config: MapsConfig, context: Context) -> list[Row]:
        weights, pairs = opened(config, context)
        model, reads = encoder(weights).eval().to(context.device), tokenizer(weights)
        if cell.settings["what"] == "maps":
            tokens = (len(_encoded(reads, pair, config.length)["input_ids"][0]) for pair in pairs)
            first = next(pair for pair, count in zip(pairs, tokens, strict=True) if count <= config.longest)
            return maps(model, reads, first, config)
        return agreement(model, reads, evenly(pairs, config.questions), config, context)

    def tables(self, rows: Sequence[Row], config: MapsConfig) -> list[Table]:
        table = Table(
            f"Question tokens of {config.questions} questions, all heads of all layers, against full attention",
            ["attention", "same key on top", "of full's 5 top keys, among its own 5", "L1 distance (0 to 2)"],
        )
        for name in config.methods:
            if name != FULL:
                alike = [row for row in rows if row.get("what") == "agreement" and row["method"] == name]
                figures = (spread(chosen(alike, key), 3) for key in ("same_top", "same_five", "l1"))
                table.rows.append([name, *figures])
        return [table]

    def picture(self, rows: Sequence[Row], config: MapsConfig) -> bytes | None:
        drawn = {row["method"]: row for row in rows if row.get("what") == "maps"}
        return drawing(drawn, list(config.methods)) if FULL in drawn else None

    def differences(self, config: MapsConfig) -> list[str]:
        tuned = "as it was pretrained: SQuAD's training questions can not be had here"
        return [
            f"Model: {config.model}, {tuned}. The paper shows a RoBERTa fine-tuned on SQuAD.",
            f"Question: the paper's is not in XQuAD; ours is the first one there that makes at most {config.longest} "
            "tokens with its paragraph (XQuAD, CC BY-SA 4.0).",
            "Head: of all layers, the one whose question tokens give, by full attention and on average, the most "
            "weight to a single token of the paragraph. The paper does not say how it chose.",
            "refined, and the table over many questions and all heads, are ours.",
        ]

    def findings(self, rows: Sequence[Row], config: MapsConfig) -> list[str]:
        same = {name: chosen(rows, "same_top", what="agreement", method=name) for name in config.methods}
        if not all(same[name] for name in config.methods if name != FULL):
            return []
        share = {name: f"{statistics.fmean(each):.0%}" for name, each in same.items() if each}
        return [
            "The paper: for almost all question tokens full and improved have the same keys on top. Over "
            f"{config.questions} questions and all heads that holds for {share['improved']} of them with improved, "
            f"{share['refined']} with refined and {share['clustered']} with clustered."
        ]


# ---------------------------------------------------------------------------------------------------- looking


def opened(config: MapsConfig, context: Context) -> tuple[str, list[Asked]]:
    if config.model != "tiny":
        return weights_of(context.data, config.model), questions(folder_of(context.data, "xquad-en"))
    words = INVENTED * 2
    pairs = [Asked(" ".join(words[i : i + 5]), " ".join(words[i:]), words[i]) for i in range(8)]
    return tiny(context.work / "tiny", INVENTED, positions=config.length), pairs


def questions(folder: Path) -> list[Asked]:
    """SQuAD's form: every question with its paragraph."""
    found = json.loads(next(folder.rglob("*.json")).read_text(encoding="utf-8"))
    return [
        Asked(each["question"], paragraph["context"], each["answers"][0]["text"])
        for article in found["data"]
        for paragraph in article["paragraphs"]
        for each in paragraph["qas"]
    ]


def _encoded(reads: Any, pair: Asked, length: int) -> Any:
    return reads([pair.question], [pair.paragraph], truncation="only_second", max_length=length)


@torch.no_grad()
def looked(model: Any, reads: Any, pair: Asked, length: int) -> Iterator[Looked]:
    """Every layer, as full attention reaches it."""
    made = _encoded(reads, pair, length)
    part = made.sequence_ids(0)  # 0: the question, 1: the paragraph, None: marks
    device = next(model.parameters()).device
    asking, telling = (torch.tensor([each == which for each in part], device=device) for which in (0, 1))
    seen: list[Looked] = []

    def keep(name: str, call: Any) -> None:
        seen.append(Looked(len(seen), call.q, call.k, call.scale, asking, telling))

    with need("clusterattn.hf", "train").observe(model, keep):
        model(**{name: torch.tensor(each, device=device) for name, each in made.items()})
    yield from seen


def maps(model: Any, reads: Any, pair: Asked, config: MapsConfig) -> list[Row]:
    """A row for each method: the weights of one head, and which keys lead."""
    layers = list(looked(model, reads, pair, config.length))
    shares = torch.stack([each.weights("exact")[:, :, each.telling].amax(-1).mean(-1) for each in layers])  # (layers h)
    layer, head = divmod(int(shares.argmax()), shares.shape[1])
    tokens = reads.convert_ids_to_tokens(_encoded(reads, pair, config.length)["input_ids"][0])
    chosen_layer = layers[layer]
    rows: list[Row] = []
    for name, method in config.methods.items():
        found = chosen_layer.weights(method)[head].cpu()
        best = found.topk(min(NAMED, found.shape[1]), -1)
        leading = [
            [tokens[at] for at, weight in zip(ats, sizes, strict=True) if weight >= ABOVE]
            for ats, sizes in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        rows.append({"method": name, "settings": method, "map": packed(found), "leading": leading})
    about = {
        "tokens": tokens,
        "asking": chosen_layer.asking.nonzero().flatten().tolist(),
        "answer": pair.answer,
        "layer": layer,
        "head": head,
        "share": float(shares[layer, head]),
    }
    rows[0] |= about
    return rows


def agreement(model: Any, reads: Any, pairs: Sequence[Asked], config: MapsConfig, context: Context) -> list[Row]:
    """A row for each method: how its maps compare with full attention's."""
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in config.methods if name != FULL}
    for done, pair in enumerate(pairs):
        context.tick("looking at questions", len(pairs), done)
        for layer in looked(model, reads, pair, config.length):
            exact = layer.weights("exact")
            for name, total in sums.items():
                mine, few = layer.weights(config.methods[name]), min(5, exact.shape[-1])
                ours, theirs = mine.topk(few, -1).indices, exact.topk(few, -1).indices
                five = (ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-2).double().mean()
                same = (mine.argmax(-1) == exact.argmax(-1)).double().mean()
                total += torch.stack([same, five, same.new_tensor(row_l1(mine, exact)), same.new_ones(())]).cpu()
    return [
        {
            "method": name,
            "settings": config.methods[name],
            **dict(zip(("same_top", "same_five", "l1"), (total[:3] / total[3]).tolist(), strict=True)),
        }
        for name, total in sums.items()
    ]


# ---------------------------------------------------------------------------------------------------- drawing


def packed(weights: Tensor) -> str:
    """Weights (rows columns) as one byte each, on a logarithmic scale from 10⁻⁴ to 1: rows of results stay small."""
    level = (255 * (1 + weights.double().clamp(10.0**-LEAST, 1).log10() / LEAST)).round().to(torch.uint8)
    return base64.b64encode(level.numpy().tobytes()).decode()


def unpacked(text: str, columns: int) -> Tensor:
    level = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).view(-1, columns)
    return 10.0 ** (LEAST * (level.double() / 255 - 1))


def drawing(drawn: dict[str, Row], methods: Sequence[str]) -> bytes:
    """A map for each method: question tokens down, all tokens across, the leading keys beside each row."""
    full = drawn[FULL]
    tokens, asking = full["tokens"], [full["tokens"][at] for at in full["asking"]]
    there = [name for name in methods if name in drawn]
    with rules():
        figure = canvas(max(0.098 * len(tokens), 5.0) + 3.2, (0.16 * len(asking) + 0.55) * len(there) + 0.8)
        axes = figure.subplots(len(there), 1, squeeze=False, sharex=True)[:, 0]
        norm = need("matplotlib.colors").LogNorm(vmin=10.0**-LEAST, vmax=1.0, clip=True)
        for axis, name in zip(axes, there, strict=True):
            image = axis.imshow(
                unpacked(drawn[name]["map"], len(tokens)).numpy(),
                norm=norm,
                cmap="magma",
                aspect="auto",
                interpolation="nearest",
            )
            axis.set_title(short(drawn[name]["settings"]) if name != FULL else FULL, loc="left")
            axis.set_yticks(range(len(asking)), asking, size=6.5)
            right = axis.secondary_yaxis("right")
            right.set_yticks(range(len(asking)), [" ".join(each) for each in drawn[name]["leading"]], size=6)
            right.tick_params(length=0)
            axis.tick_params(length=0)
        axes[-1].set_xticks(range(len(tokens)), tokens, rotation=90, size=5.5)
        weight_bar(figure, image, list(axes))
        figure.suptitle(
            f"Layer {full['layer'] + 1}, head {full['head'] + 1}: a question token gives {full['share']:.0%} of its "
            f"attention to one paragraph token, on average. Right: keys of weight {ABOVE} or more. The answer is "
            f'"{full["answer"]}".',
            size=9,
            x=0.01,
            ha="left",
        )
        return as_png(figure)


EXPERIMENTS = (ClusteredFig8,)
