"""Translation: parallel sentences, one vocabulary of word pieces for both languages, BLEU."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn._extras import need
from clusterattn.measure.reading import text_of
from clusterattn.methods import MethodSpec

from ..models.translator import Translator
from ._task import Batch, Figures, Task, classified, padded, several
from .vocabulary import keep_tokenizer, kept_tokenizer

Pair = tuple[str, str]  # source and target, as people write them
Example = tuple[Tensor, Tensor]  # their tokens, the source with its end, the target without

SPECIALS = ("<pad>", "<s>", "</s>")
PADDING, START, END = range(3)
IGNORE = -100
DEV, MOST_DEV = 0.05, 1000  # share of the pairs held out where there is no dev file, and how many at most
NAMES = {"train": ("train",), "dev": ("dev", "val", "valid"), "test": ("test", "test_2016_flickr")}


class Translate(Task):
    """Sentence pairs by split, and a byte-level BPE ``tokenizer`` for both languages.

    beam        beams of the search in ``judge``; 1 (greedy) is enough to compare the weights of one training
    length      training pairs with more tokens on either side are left out, longer sources cut
    smoothing   of the labels in training
    """

    name: ClassVar[str] = "translate"
    figure: ClassVar[str] = "bleu"

    def __init__(
        self,
        pairs: Mapping[str, Sequence[Pair]],
        tokenizer: Any = None,
        *,
        vocabulary: int = 8000,
        length: int = 128,
        beam: int = 1,
        smoothing: float = 0.1,
    ) -> None:
        if tokenizer is None:
            tokenizer = pieces((text for pair in pairs["train"] for text in pair), vocabulary)
        self.tokenizer, self.longest, self.beam, self.smoothing = tokenizer, length, beam, smoothing
        self.splits = {split: self._examples(found, split == "train") for split, found in pairs.items()}

    @classmethod
    def read(
        cls,
        data: Path,
        *,
        length: int | None = None,
        seed: int = 0,
        source: str | None = None,
        target: str | None = None,
        **options: Any,
    ) -> Translate:
        """A folder with train.SRC and train.TGT, and dev.* and test.* of the same endings, plain or .gz (Multi30k); a
        folder with train.tsv …; or one .tsv file: source, tab, target. The endings decide the direction: alphabetical
        (de -> en, src -> tgt), or as told.

        Without dev files 5 % of the training pairs, at most 1000, are held out for it by ``seed``; without test files
        there is no test split."""
        pairs = read_pairs(Path(data), source, target)
        if "dev" not in pairs:
            mixed = torch.randperm(len(pairs["train"]), generator=torch.Generator().manual_seed(seed)).tolist()
            held = max(min(int(DEV * len(mixed)), MOST_DEV), 1)
            pairs |= {
                split: [pairs["train"][at] for at in chosen]
                for split, chosen in (("dev", mixed[:held]), ("train", mixed[held:]))
            }
        return cls(pairs, **options, **({} if length is None else {"length": length}))

    def save(self, folder: Path) -> None:
        keep_tokenizer(folder, self.tokenizer, self.longest)

    @classmethod
    def restore(cls, folder: Path) -> Translate:
        tokenizer, length = kept_tokenizer(folder)
        return cls({}, tokenizer, length=length)

    def predict(self, model: nn.Module, inputs: Sequence[str], beam: int = 4) -> list[str]:
        """Translations, by beam search."""
        device = next(model.parameters()).device
        translations: list[str] = []
        training = model.training
        with torch.no_grad():
            model.eval()
            for at in range(0, len(several(inputs)), 64):
                source, mask = padded([self._source(ids) for ids in self._encoded(inputs[at : at + 64])], PADDING)
                translations += self._translated(model, source.to(device), mask.to(device), beam)
        model.train(training)
        return translations

    def model(self, method: MethodSpec, **sizes: Any) -> Translator:
        return Translator(self.tokenizer.get_vocab_size(), method, padding=PADDING, start=START, end=END, **sizes)

    def length(self, example: Example) -> int:
        return len(example[0]) + len(example[1])

    def collate(self, examples: Sequence[Example]) -> Batch:
        edge = torch.tensor([START, END])
        source, source_mask = padded([source for source, _ in examples], PADDING)
        target, target_mask = padded([torch.cat([edge[:1], target]) for _, target in examples], PADDING)
        wanted, _ = padded([torch.cat([target, edge[1:]]) for _, target in examples], IGNORE)
        return {
            "source": source,
            "source_mask": source_mask,
            "target": target,
            "target_mask": target_mask,
            "wanted": wanted,
        }

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        answer = model(batch["source"], batch["source_mask"], batch["target"], batch["target_mask"])
        return classified(answer, batch["wanted"], IGNORE, self.smoothing)

    def judge(self, model: nn.Module, batches: Iterable[Batch]) -> Figures:
        """BLEU of the search's answers, and what the model thinks of the references in nats per token: "nll" with the
        whole reference at hand, as in training, "prefix_nll" with the prefix alone, as in the search. They are one
        where the decoder's method is strictly causal; elsewhere later tokens of the reference help to group."""
        translations: list[str] = []
        wanted: list[str] = []
        surprise = torch.zeros(3, dtype=torch.float64)
        assert isinstance(model, Translator)
        for batch in batches:
            surprise += torch.tensor(self.surprises(model, batch), dtype=torch.float64)
            translations += self._translated(model, batch["source"], batch["source_mask"], self.beam)
            wanted += self._texts([row[row > END].tolist() for row in batch["wanted"].cpu()])
        whole, prefix, tokens = surprise.tolist()
        count = max(tokens, 1.0)
        return bleu(translations, wanted) | {"nll": whole / count, "prefix_nll": prefix / count}

    def surprises(self, model: Translator, batch: Batch) -> tuple[float, float, float]:
        """Nats of a batch's references with the whole of them at hand, from the prefix alone, and their tokens."""
        answer = model(batch["source"], batch["source_mask"], batch["target"], batch["target_mask"])
        total, count = classified(answer._replace(auxiliary=torch.zeros_like(answer.auxiliary)), batch["wanted"])
        whole = prefix = float(total)
        if not model.strict:
            asked = (batch["source"], batch["source_mask"], batch["target"], batch["wanted"])
            prefix = float(model.surprise(*asked, IGNORE).sum())
        return whole, prefix, float(count)

    def _translated(self, model: nn.Module, source: Tensor, source_mask: Tensor, beam: int) -> list[str]:
        assert isinstance(model, Translator)
        return self._texts(model.translate(source, source_mask, beam=beam))

    def _texts(self, tokens: list[list[int]]) -> list[str]:
        return [text.strip() for text in self.tokenizer.decode_batch(tokens)]

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self.tokenizer.encode_batch(list(texts))]

    def _source(self, ids: list[int]) -> list[int]:
        return ids[: self.longest - 1] + [END]

    def _examples(self, pairs: Sequence[Pair], training: bool) -> list[Example]:
        sources, targets = (self._encoded([pair[side] for pair in pairs]) for side in (0, 1))
        found = [
            (torch.tensor(self._source(source)), torch.tensor(target, dtype=torch.long))
            for source, target in zip(sources, targets, strict=True)
            if not training or max(len(source), len(target)) < self.longest
        ]
        if pairs and not found:
            least = min(max(len(source), len(target)) for source, target in zip(sources, targets, strict=True))
            raise bad_value(
                f"pairs of fewer than {self.longest} tokens (length)",
                f"none: the shortest has {least}",
                "a larger length",
            )
        if len(found) < len(pairs):
            wording = f"{len(pairs) - len(found)} of {len(pairs)} training pairs have {self.longest} tokens or more and"
            warnings.warn(f"{wording} are left out", stacklevel=3)
        return found


def pieces(texts: Iterable[str], vocabulary: int = 8000, specials: Sequence[str] = SPECIALS) -> Any:
    """Byte-level BPE: every text has tokens, and tokens give back the text."""
    tokenizers = need("tokenizers", "train")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(specials),
        show_progress=False,
        min_frequency=2,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(texts, trainer)
    return made


def bleu(got: Sequence[str], wanted: Sequence[str]) -> Figures:
    """bleu: sacreBLEU on text as people write it. tokenized_bleu: on lower-cased words and punctuation marks, which is
    what older papers report (IWSLT14 is prepared so)."""
    score = need("sacrebleu", "train").corpus_bleu
    apart = ([" ".join(re.findall(r"\w+|[^\w\s]", text.lower())) for text in texts] for texts in (got, wanted))
    ours, theirs = apart
    return {
        "bleu": score(list(got), [list(wanted)]).score,
        "tokenized_bleu": score(ours, [theirs], tokenize="none", force=True).score,
    }


def read_pairs(data: Path, source: str | None = None, target: str | None = None) -> dict[str, list[Pair]]:
    """Sentence pairs by split: train, and dev and test where there are files for them."""
    if data.is_file():
        return {"train": _table(data)}
    files = {path.name.removesuffix(".gz"): path for path in sorted(data.glob("*")) if path.is_file()}
    ends = sorted({name.partition(".")[2] for name in files if name.startswith("train.")})
    if ends == ["tsv"]:
        return {
            split: _table(files[f"{name}.tsv"])
            for split, names in NAMES.items()
            for name in names[::-1]
            if f"{name}.tsv" in files
        }
    one = source or next((end for end in ends if end != target), None)
    other = target or next((end for end in ends if end != one), None)
    if one not in ends or other not in ends or (len(ends) > 2 and not (source and target)):
        raise bad_value(
            "a folder with train.SRC and train.TGT, or train.tsv",
            f"{data} with train.{ends or '…'}",
            "two files of as many lines, or source= and target= to choose among endings",
        )
    found: dict[str, list[Pair]] = {}
    for split, names in NAMES.items():
        for name in names:
            if f"{name}.{one}" in files and f"{name}.{other}" in files and split not in found:
                sides = [_lines(files[f"{name}.{end}"]) for end in (one, other)]
                if len(sides[0]) != len(sides[1]):
                    got = f"{len(sides[0])} and {len(sides[1])} lines of {name} in {data}"
                    raise bad_value("as many sources as targets", got, "one sentence a line")
                found[split] = [(a, b) for a, b in zip(*sides, strict=True) if a.strip() and b.strip()]
    return found


def _table(path: Path) -> list[Pair]:
    rows = [line.split("\t") for line in _lines(path) if line.strip()]
    for number, row in enumerate(rows, start=1):
        if len(row) < 2:
            raise bad_value(f"source, tab, target in {path}", f"line {number}: {row[0][:60]!r}", "one pair a line")
    return [(row[0], row[1]) for row in rows]


def _lines(path: Path) -> list[str]:
    lines = [line.rstrip("\r") for line in text_of(path).split("\n")]
    return lines[:-1] if lines[-1] == "" else lines
