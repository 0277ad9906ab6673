"""Sentences and pairs of sentences for a pretrained model: the pieces of GLUE that can be had with their labels, and
the two sets of longer texts of SMYRF's rebuttal."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn.measure.reading import spread
from clusterattn.methods import MethodSpec

from ..models.pretrained import Pretrained, tiny, tokenizer
from ._task import Batch, Figures, Task, classified, padded
from .files import folder_of, inside


class Text(NamedTuple):
    first: str
    second: str | None
    label: float


class TokenExample(NamedTuple):
    ids: Tensor  # (n,)
    kinds: Tensor | None  # (n,): first or second sentence, where the model wants to know
    label: float


Splits = dict[str, list[Text]]


@dataclass(frozen=True)
class GluePiece:
    """One set of labelled texts.

    archive   what its folder or archive is called
    measure   which figure is its "score"
    read      its folder and a seed -> "train", "dev" (which chooses the weights) and "test" (which is reported)
    split     how the three were made, for people
    labels    1: a number between 0 and 1
    """

    title: str
    archive: str
    measure: str
    read: Callable[[Path, int], Splits]
    split: str
    pairs: bool = False
    labels: int = 2


class Glue(Task):
    """A piece as the pretrained model's own tokenizer reads it. ``score`` is the piece's measure.

    texts     "train", "dev" and "test"
    weights   the folder (or hub id) of the pretrained model
    length    tokens at most; the longer sentence of a pair is cut first
    """

    name: ClassVar[str] = "glue"
    figure: ClassVar[str] = "score"
    step: ClassVar[int] = 1  # widths of batches are multiples of it

    def __init__(
        self, piece: GluePiece, texts: Mapping[str, Sequence[Text]], weights: str | Path, *, length: int = 128
    ) -> None:
        self.piece, self.weights = piece, weights
        self.tokenizer = tokenizer(weights)
        self.splits = {split: tokenised(self.tokenizer, each, length) for split, each in texts.items()}

    def model(self, method: MethodSpec, **sizes: Any) -> nn.Module:
        return Pretrained(self.weights, self.piece.labels, method, **sizes)

    def length(self, example: TokenExample) -> int:
        return len(example.ids)

    def collate(self, examples: Sequence[TokenExample]) -> Batch:
        ids, real = padded([each.ids for each in examples], self.tokenizer.pad_token_id or 0, self.step)
        batch = {"input_ids": ids.long(), "attention_mask": real}
        kinds = [each.kinds for each in examples if each.kinds is not None]
        if kinds:
            batch["token_type_ids"] = padded(kinds, step=self.step)[0].long()
        number = torch.float32 if self.piece.labels == 1 else torch.int64
        return {**batch, "labels": torch.tensor([each.label for each in examples]).to(number)}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        answer = model(**_inputs(batch))
        if self.piece.labels > 1:
            return classified(answer, batch["labels"])
        total = F.mse_loss(answer.logits.squeeze(-1).float(), batch["labels"], reduction="sum")
        count = batch["labels"].new_full((), len(batch["labels"]), dtype=torch.int64)
        return total + answer.auxiliary * count, count

    def judge(self, model: nn.Module, batches: Iterable[Batch]) -> Figures:
        return self.figures(*answers(model, batches))

    def figures(self, logits: Tensor, labels: Tensor) -> Figures:
        """Every figure of these answers (x labels) to these truths (x,)."""
        if self.piece.labels == 1:
            found = {"pearson": pearson(logits[:, 0], labels), "spearman": spearman(logits[:, 0], labels)}
        else:
            picked = logits.argmax(-1)
            found = {"accuracy": float((picked == labels).double().mean())}
            if self.piece.labels == 2:
                found |= {"matthews": pearson(picked, labels), "f1": f1(picked, labels)}
        return {"score": found[self.piece.measure], **found}

    def alike(self, logits: Tensor, others: Tensor) -> float:
        """How much two answers to the same texts agree: the share of equal labels, or the correlation of numbers."""
        if self.piece.labels == 1:
            return pearson(logits[:, 0], others[:, 0])
        return float((logits.argmax(-1) == others.argmax(-1)).double().mean())


def answers(model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """What the model answers to all of them (x labels), and the truth (x,); on the CPU."""
    logits, labels = [], []
    for batch in batches:
        logits.append(model(**_inputs(batch)).logits.float())
        labels.append(batch["labels"])
    return torch.cat(logits).cpu(), torch.cat(labels).cpu()


def _inputs(batch: Batch) -> Batch:
    return {name: each for name, each in batch.items() if name in ("input_ids", "attention_mask", "token_type_ids")}


def tokenised(tokenizer: Any, texts: Sequence[Text], length: int) -> list[TokenExample]:
    if not texts:
        return []
    seconds = [each.second or "" for each in texts] if texts[0].second is not None else None
    most = min(length, tokenizer.model_max_length)
    made = tokenizer([each.first for each in texts], seconds, truncation=True, max_length=most)
    kinds = made.get("token_type_ids") or [None] * len(texts)
    rows = zip(made["input_ids"], kinds, (each.label for each in texts), strict=True)
    whole = torch.int32  # half the memory; widened in the batch
    return [
        TokenExample(torch.tensor(ids, dtype=whole), None if kind is None else torch.tensor(kind, dtype=whole), label)
        for ids, kind, label in rows
    ]


# ---------------------------------------------------------------------------------------------------- figures


def pearson(x: Tensor, y: Tensor) -> float:
    """Correlation; of two-valued x and y that is Matthews' coefficient. 0 where either is constant."""
    x, y = (each.double() - each.double().mean() for each in (x, y))
    size = float(x.norm() * y.norm())
    return float((x * y).sum()) / size if size > 0 else 0.0


def spearman(x: Tensor, y: Tensor) -> float:
    return pearson(ranks(x), ranks(y))


def ranks(x: Tensor) -> Tensor:
    """From 1; equals share the mean of their ranks."""
    where: Tensor
    counts: Tensor
    _, where, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2.0)[where]


def f1(picked: Tensor, truth: Tensor) -> float:
    """Of label 1."""
    hits = float(((picked == 1) & (truth == 1)).sum())
    return 2 * hits / max(float((picked == 1).sum() + (truth == 1).sum()), 1.0)


# ---------------------------------------------------------------------------------------------------- reading

WORDS = {"entailment": 1.0, "not_entailment": 0.0}
INFERENCE = {"entailment": 0.0, "neutral": 1.0, "contradiction": 2.0}  # as SNLI is numbered where it is numbered


def table(
    path: Path, first: int, second: int | None, label: int, times: float = 1.0, words: Mapping[str, float] = WORDS
) -> list[Text]:
    """Tab-separated lines, the texts and the label in these columns; a header says "label" (GLUE also: "gold_label")
    where labels are. A negative column is counted from the end."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        cells = line.split("\t")
        if not line.strip() or cells[min(label, len(cells) - 1)] in ("label", "gold_label"):
            continue
        try:
            word = cells[label]
            value = words[word] if word in words else float(word) * times
            found.append(Text(cells[first], None if second is None else cells[second], value))
        except (IndexError, ValueError):
            wanted = f"a label in column {label + 1} and text in the others"
            raise bad_value(wanted, f"{path.name}, line {number}: {line[:60]!r}", "tabs between columns") from None
    return found


def parted(
    texts: Sequence[Text], *shares: float, seed: int = 0, by: Callable[[Text], str] | None = None
) -> list[list[Text]]:
    """Random parts of these shares, and the rest as the last one. Texts with the same ``by`` stay together."""
    names = [by(each) if by else str(at) for at, each in enumerate(texts)]
    kinds = list(dict.fromkeys(names))
    mixed = torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed)).tolist()
    home = {kinds[at]: place / len(kinds) for place, at in enumerate(mixed)}
    edges = [0.0, *torch.tensor(shares, dtype=torch.float64).cumsum(0).tolist(), 1.0]
    return [
        [text for name, text in zip(names, texts, strict=True) if low <= home[name] < high]
        for low, high in itertools.pairwise(edges)
    ]


def _cola(folder: Path, seed: int) -> Splits:
    files = {"train": "train", "dev": "val", "test": "dev"}
    return {split: table(folder / "cola" / f"{file}.tsv", 3, None, 1) for split, file in files.items()}


def _wnli(folder: Path, seed: int) -> Splits:
    files = {"train": "train", "dev": "val", "test": "dev"}
    return {split: table(folder / "wnli" / f"{file}.tsv", 1, 2, 3) for split, file in files.items()}


def _rte(folder: Path, seed: int) -> Splits:
    dev, train = parted(table(folder / "rte" / "train.tsv", 1, 2, 3), 0.1, seed=seed)
    return {"train": train, "dev": dev, "test": table(folder / "rte" / "dev.tsv", 1, 2, 3)}


def _qnli(folder: Path, seed: int) -> Splits:
    whole = table(folder / "qnli" / "dev.tsv", 1, 2, 3)
    test, dev, train = parted(whole, 0.1, 0.1, seed=seed, by=lambda each: each.first)
    return {"train": train, "dev": dev, "test": test}


def _mrpc(folder: Path, seed: int) -> Splits:
    folder = inside(folder, "mrpc")
    dev, train = parted(table(folder / "train.txt", 0, 1, 2), 0.1, seed=seed)
    return {"train": train, "dev": dev, "test": table(folder / "test.txt", 0, 1, 2)}


def _snli(folder: Path, seed: int) -> Splits:
    folder = inside(folder, "snli")
    known = folder / "train.txt"
    whole = table(known if known.is_file() else folder / "dev.txt", 0, 1, 2, words=INFERENCE)
    dev, train = parted(whole, 0.1, seed=seed, by=lambda each: each.first)
    return {"train": train, "dev": dev, "test": table(folder / "test.txt", 0, 1, 2, words=INFERENCE)}


def _mnli(part: str) -> Callable[[Path, int], Splits]:
    """GLUE's files: sentences in columns 9 and 10, the label in the last."""

    def read(folder: Path, seed: int) -> Splits:
        home = inside(folder, "train.tsv").parent
        dev, train = parted(table(home / "train.tsv", 8, 9, -1, words=INFERENCE), 0.02, seed=seed)
        return {"train": train, "dev": dev, "test": table(home / f"dev_{part}.tsv", 8, 9, -1, words=INFERENCE)}

    return read


def _stsb(folder: Path, seed: int) -> Splits:
    return {split: table(folder / f"sts-{split}.csv", 5, 6, 4, times=1 / 5) for split in ("train", "dev", "test")}


def _sst2(folder: Path, seed: int) -> Splits:
    folder = inside(folder, "stsa.binary.train").parent

    def lines(split: str) -> list[Text]:
        found = (folder / f"stsa.binary.{split}").read_text(encoding="utf-8").split("\n")
        return [Text(line[2:], None, float(line[0])) for line in found if line.strip()]

    return {split: lines(split) for split in ("train", "dev", "test")}


def _imdb(folder: Path, seed: int) -> Splits:
    folder = inside(folder, "train/pos").parent.parent

    def reviews(part: str) -> list[Text]:
        files = [
            (file, label)
            for label, kind in enumerate(("neg", "pos"))
            for file in sorted((folder / part / kind).glob("*.txt"))
        ]
        return [Text(file.read_text(encoding="utf-8").replace("<br />", " "), None, label) for file, label in files]

    dev, train = parted(reviews("train"), 0.1, seed=seed)
    return {"train": train, "dev": dev, "test": reviews("test")}


def _hyperpartisan(folder: Path, seed: int) -> Splits:
    truths, articles = (xml.parse(next(folder.rglob(f"{start}*.xml"))).getroot() for start in ("ground", "articles"))
    labels = {each.get("id"): float(each.get("hyperpartisan") == "true") for each in truths.iter("article")}
    texts = [
        Text(f"{each.get('title')}. {' '.join(''.join(each.itertext()).split())}", None, labels[each.get("id")])
        for each in articles.iter("article")
    ]
    test, dev, train = parted(texts, 0.1, 0.1, seed=seed)
    return {"train": train, "dev": dev, "test": test}


TENTH = "a tenth of the training pairs chooses the weights; GLUE's dev set is judged"
PIECES = {
    "cola": GluePiece(
        "CoLA",
        "glue-small",
        "matthews",
        _cola,
        "the held-out training sentences choose the weights; GLUE's dev set is judged",
    ),
    "mrpc": GluePiece("MRPC", "matching", "accuracy", _mrpc, TENTH, pairs=True),
    "qnli": GluePiece(
        "QNLI",
        "glue-small",
        "accuracy",
        _qnli,
        "only the dev set is at hand: 80 / 10 / 10 % of its questions train, choose the weights, and are judged",
        pairs=True,
    ),
    "snli": GluePiece(
        "SNLI",
        "matching",
        "accuracy",
        _snli,
        "its training pairs, or without them those of its dev set, by premise: nine tenths train, one chooses the "
        "weights; the published test set is judged",
        pairs=True,
        labels=3,
    ),
    **{
        name: GluePiece(
            f"MNLI ({part})",
            "mnli",
            "accuracy",
            _mnli(part),
            f"one training pair in fifty chooses the weights; GLUE's {part} dev set is judged",
            pairs=True,
            labels=3,
        )
        for name, part in (("mnli", "matched"), ("mnli-mm", "mismatched"))
    },
    "rte": GluePiece("RTE", "glue-small", "accuracy", _rte, TENTH, pairs=True),
    "sst2": GluePiece(
        "SST-2",
        "sentences",
        "accuracy",
        _sst2,
        "whole sentences only (6920, without the phrases that GLUE trains on); judged on the published test set",
    ),
    "stsb": GluePiece("STS-B", "stsb", "pearson", _stsb, "judged on the published test set", pairs=True, labels=1),
    "wnli": GluePiece(
        "WNLI",
        "glue-small",
        "accuracy",
        _wnli,
        "the held-out training pairs choose the weights; GLUE's dev set is judged",
        pairs=True,
    ),
    "imdb": GluePiece("IMDB", "imdb", "accuracy", _imdb, "a tenth of the training reviews chooses the weights"),
    "hyperpartisan": GluePiece(
        "Hyperpartisan",
        "hyperpartisan",
        "accuracy",
        _hyperpartisan,
        "80 / 10 / 10 % of the 645 articles train, choose the weights, and are judged; another cut for every seed",
    ),
}


FOLDERS = {"all-MiniLM-L6-v2": ("all-MiniLM-L6-v2", "minilm")}  # a model's folder may go by a shorter name


def weights_of(data: Path | None, name: str) -> str:
    """Where a model's weights are: ``name`` itself if it is a hub id or a path, else its folder under ``data``."""
    if "/" in name:
        return name
    missing: list[ValueError] = []
    for called in FOLDERS.get(name, (name,)):
        try:
            found = folder_of(data, called)
        except ValueError as error:
            missing.append(error)
            continue
        if not (found / "config.json").is_file():
            got = f"{found}, without config.json"
            raise bad_value("a Hugging Face model folder", got, "what save_pretrained wrote")
        return str(found)
    raise missing[0]


def opened(
    name: str,
    data: Path | None,
    model: str,
    work: Path,
    *,
    length: int = 128,
    seed: int = 0,
    limits: Mapping[str, int] | None = None,
) -> Glue:
    """A piece by name with a model by name. ``limits``: at most so many texts of each split, spread evenly.

    model   as ``weights_of`` has it; "tiny" is a random little model, written to ``work``, with invented texts
    """
    piece, limits = PIECES[name], limits or {}
    if model == "tiny":
        weights = tiny(work / "tiny", INVENTED, positions=length)
        texts = invented(piece, {"train": 32, "dev": 16, "test": 16, **limits}, length, seed)
    else:
        weights = weights_of(data, model)
        texts = piece.read(folder_of(data, piece.archive), seed)
    texts = {split: spread(each, limits.get(split)) for split, each in texts.items()}
    return Glue(piece, texts, weights, length=length)


# ---------------------------------------------------------------------------------------------------- invented

INVENTED = [f"{one}{two}" for one in ("ba", "do", "fi", "ku", "le") for two in ("n", "r", "s", "t", "lo", "ma")]


def invented(piece: GluePiece, sizes: Mapping[str, int], length: int, seed: int) -> Splits:
    """Texts of the piece's form, told apart by their words: a label prefers one half of them, a pair that is alike
    shares its half."""
    dice = torch.Generator().manual_seed(seed)
    half = len(INVENTED) // 2

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=dice))

    def sentence(side: int) -> str:
        words = 2 + draw(max(length // (4 if piece.pairs else 2), 1))
        return " ".join(INVENTED[draw(half) + half * (side if draw(5) else 1 - side)] for _ in range(words))

    def text(label: int) -> Text:
        side = draw(2) if piece.pairs else label
        other = sentence(side if label else 1 - side) if piece.pairs else None
        return Text(sentence(side), other, float(label) if piece.labels > 1 else (label + draw(100) / 100) / 2)

    return {split: [text(at % 2) for at in range(size)] for split, size in sizes.items()}
