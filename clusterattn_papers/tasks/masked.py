"""Masked language modelling with next-sentence prediction (BERT's two tasks) on plain text."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn._extras import need
from clusterattn.measure.reading import text_of
from clusterattn.methods import MethodSpec

from ..models import Answer
from ..models.masked import MaskedLM
from ._task import Batch, Figures, Task, classified, padded, several
from .files import folder_of, inside
from .glue import Glue, GluePiece, Splits, tokenised
from .labelled_files import JSON_LINES, records
from .vocabulary import keep_tokenizer, kept_tokenizer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)
ASKED = 0.15  # of the tokens; of these 80 % become [MASK], 10 % another token, 10 % stay
SHORT = 0.3  # of the batches are of shorter texts, as later tasks have them
LEAST = 6  # tokens in the shortest text
PASSES = 10  # times through the text with new masks and new second texts before they come again
HELD = 20  # one stretch of text in so many is the dev set


class Masked(Task):
    """Text as two runs of tokens, [CLS] first [SEP] second [SEP]: the second follows the first, or does not.

    documents   texts; no run goes across two of them
    length      tokens of a whole input
    """

    name: ClassVar[str] = "masked"
    figure: ClassVar[str] = "nll"
    better: ClassVar[str] = "lower"

    def __init__(
        self, documents: Sequence[str], tokenizer: Any = None, *, vocabulary: int = 8000, length: int = 128
    ) -> None:
        self.tokenizer = pieces(documents, vocabulary) if tokenizer is None else tokenizer
        self.longest, self.width = length, (length - 3) // 2
        if self.width < LEAST:
            raise bad_value(f"length of at least {2 * LEAST + 3}", length, "length=128")
        self.runs, firsts, held = self._cut(documents)
        of_train, of_dev = firsts[~held[firsts]], firsts[held[firsts]]
        self.pairs = {"train": of_train, "dev": of_dev}
        self.pool = {"train": (~held).nonzero().squeeze(1), "dev": held.nonzero().squeeze(1)}
        # an example is a number: which pair, and the seed of its masks
        passes = len(of_train) * PASSES
        self.splits = {"train": range(passes), "dev": range(passes, passes + len(of_dev))}

    @classmethod
    def read(cls, data: Path, *, length: int | None = None, seed: int = 0, **options: Any) -> Masked:
        """A text file, or a folder of .txt files, each a document. Files of Wikipedia's XML, also .xz, are articles;
        their markup is taken off.

        A twentieth of the text is dev, in stretches spread evenly over it, the same for every ``seed``; there is no
        test split."""
        return cls(documents_in(Path(data)), **options, **({} if length is None else {"length": length}))

    def save(self, folder: Path) -> None:
        keep_tokenizer(folder, self.tokenizer, self.longest)

    @classmethod
    def restore(cls, folder: Path) -> Masked:
        tokenizer, length = kept_tokenizer(folder)
        return cls([], tokenizer, length=length)

    def predict(self, model: nn.Module, inputs: Sequence[str]) -> list[str]:
        """Texts with [MASK] in them, filled in."""
        device, training = next(model.parameters()).device, model.training
        ids = [found.ids[: self.longest] for found in self.tokenizer.encode_batch(list(several(inputs)))]
        if ids and not any(MASK in each for each in ids):
            raise bad_value("[MASK] where a word is to be filled in", inputs[0], '"the [MASK] ran"')
        tokens, real = (each.to(device) for each in padded(ids, PAD))
        with torch.no_grad():
            model.eval()
            everywhere = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
            logits = model(tokens, real, torch.zeros_like(tokens), everywhere).logits
            logits[..., : len(SPECIALS)] = float("-inf")
            filled = torch.where(tokens == MASK, logits.argmax(-1), tokens)
            model.train(training)
        return [str(text) for text in self.tokenizer.decode_batch(filled.tolist())]

    def model(self, method: MethodSpec, **sizes: Any) -> MaskedLM:
        return MaskedLM(self.tokenizer.get_vocab_size(), method, **({"length": self.longest} | sizes))

    def collate(self, examples: Sequence[int]) -> Batch:
        """All inputs of a batch are equally long: nothing is padded. Drawn from the number of the first example."""
        dice = torch.Generator().manual_seed(examples[0])
        at = torch.tensor(examples)
        split, passed = ("train", 0) if examples[0] in self.splits["train"] else ("dev", len(self.splits["train"]))
        first = self.pairs[split][(at - passed) % len(self.pairs[split])]
        b, width = len(first), self.width
        if split == "train" and torch.rand((), generator=dice) < SHORT:
            width = int(torch.randint(LEAST, width + 1, (), generator=dice))
        follows = torch.rand(b, generator=dice) < 0.5
        pool = self.pool[split]
        other = pool[torch.randint(len(pool), (b,), generator=dice)]
        # the end of the first run and the beginning of the second: short texts too follow one another
        one, two = self.runs[first, -width:].long(), self.runs[torch.where(follows, first + 1, other), :width].long()
        edge = torch.full((b, 1), SEP)
        truth = torch.cat([torch.full((b, 1), CLS), one, edge, two, edge], 1)
        kinds = (torch.arange(truth.shape[1]) > width + 1).long().expand_as(truth)
        asked, tokens = self._hidden(truth, dice)
        return {
            "tokens": tokens,
            "kinds": kinds,
            "asked": asked,
            "wanted": truth.gather(1, asked),
            "follows": follows.long(),
        }

    def _hidden(self, truth: Tensor, dice: torch.Generator) -> tuple[Tensor, Tensor]:
        """Positions to ask for (b p), and the tokens with these hidden."""
        b, n = truth.shape
        lots = torch.rand(b, n, generator=dice).masked_fill(truth < len(SPECIALS), -1.0)
        asked = lots.topk(max(round(ASKED * n), 1), -1).indices
        luck = torch.rand(asked.shape, generator=dice)
        any_word = torch.randint(len(SPECIALS), self.tokenizer.get_vocab_size(), asked.shape, generator=dice)
        put = torch.where(luck < 0.8, MASK, torch.where(luck < 0.9, any_word, truth.gather(1, asked)))
        return asked, truth.scatter(1, asked, put)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean over guessed words plus the mean over pairs, as a sum over words."""
        guesses = model(batch["tokens"], None, batch["kinds"], batch["asked"])
        words, count = classified(Answer(guesses.logits, guesses.auxiliary), batch["wanted"])
        order = F.cross_entropy(guesses.follows.float(), batch["follows"], reduction="sum")
        return words + order * batch["asked"].shape[1], count

    def judge(self, model: nn.Module, batches: Iterable[Batch]) -> Figures:
        """nll (nats) and accuracy of the hidden words, accuracy of what follows what."""
        surprise = right = words = order = pairs = 0.0
        for batch in batches:
            guesses = model(batch["tokens"], None, batch["kinds"], batch["asked"])
            wanted = batch["wanted"]
            surprise += float(F.cross_entropy(guesses.logits.flatten(0, 1).float(), wanted.flatten(), reduction="sum"))
            right += float((guesses.logits.argmax(-1) == wanted).sum())
            order += float((guesses.follows.argmax(-1) == batch["follows"]).sum())
            words, pairs = words + wanted.numel(), pairs + len(wanted)
        words, pairs = max(words, 1.0), max(pairs, 1.0)
        return {"nll": surprise / words, "accuracy": right / words, "next_accuracy": order / pairs}

    def _cut(self, documents: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Runs (r width) of tokens, those that have another one of their document after them, and who is held out."""
        w, tables, firsts, count = self.width, [torch.empty(0, self.width, dtype=torch.int32)], [], 0
        for found in self.tokenizer.encode_batch_fast(list(documents), add_special_tokens=False):
            runs = len(found.ids) // w
            tables.append(torch.tensor(found.ids[: runs * w], dtype=torch.int32).view(runs, w))
            firsts.append(torch.arange(count, max(count + runs - 1, count)))
            count += runs
        stretch = max(min(64, count // HELD), 2)
        held = torch.arange(count) // stretch % HELD == HELD // 2
        first = torch.cat(firsts) if firsts else torch.empty(0, dtype=torch.long)
        first = first[held[first] == held[(first + 1).clamp(max=max(count - 1, 0))]]  # and on the same side
        if documents and not (held[first].any() and (~held[first]).any()):
            wanted = f"text for {2 * HELD} runs of {w} tokens, each inside one document"
            got = f"{count} runs in {len(documents)} document{'s' * (len(documents) > 1)}"
            raise bad_value(wanted, got, "more or longer documents, or a shorter length")
        return torch.cat(tables), first, held


def pieces(documents: Iterable[str], vocabulary: int = 8000) -> Any:
    """Lower-case WordPiece, as BERT-uncased."""
    tokenizers = need("tokenizers", "train")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=SPECIALS[UNK]))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIALS), show_progress=False, min_frequency=2, limit_alphabet=200
    )
    made.train_from_iterator(documents, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return made


# ------------------------------------------------------------------------------------------------ fine-tuning


class FineTuning(Glue):
    """A piece of GLUE for a body of ours, in the tokens it was pretrained with. Batches have few widths: their updates
    can be recorded as CUDA graphs."""

    step = 16

    def __init__(self, piece: GluePiece, texts: Splits, tokenizer: Any, *, length: int = 128) -> None:
        self.piece = piece
        self.tokenizer = need("transformers", "train").PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=SPECIALS[PAD],
            unk_token=SPECIALS[UNK],
            cls_token=SPECIALS[CLS],
            sep_token=SPECIALS[SEP],
            mask_token=SPECIALS[MASK],
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        )
        self.splits = {split: tokenised(self.tokenizer, each, length) for split, each in texts.items()}

    def model(self, method: MethodSpec, **sizes: Any) -> nn.Module:
        raise bad_value("a pretrained body", "a method", "clusterattn.models.masked.Tuned(body, piece.labels)")


# ------------------------------------------------------------------------------------------------ text


def documents_in(data: Path) -> list[str]:
    """Of a file, or of every .txt, .xml and .xz file of a folder; of a table, the column text."""
    if data.is_dir():
        files = sorted(each for each in data.iterdir() if each.suffix in (".txt", ".xml", ".xz"))
        if not files:
            raise bad_value("a folder with .txt, .xml or .xz files", f"{data} with none", "the folder they lie in")
        return [text for each in files for text in documents_in(each)]
    if data.suffix.lower() in (".csv", ".tsv", *JSON_LINES):
        return [text for (text,) in records(data, ("text",))]
    text = text_of(data)
    return articles(text) if text.startswith("<mediawiki") else [" ".join(text.split())]


def published(data: Path | None) -> list[str]:
    """The articles of enwik8 (a file, also its beginning, also .xz) and the books of Gutenberg under ``data``."""
    books = documents_in(folder_of(data, "gutenberg"))
    assert data is not None  # or folder_of would have said so
    return documents_in(inside(Path(data), "enwik8*")) + books


ARTICLE = re.compile(r"<text[^>]*>(.*?)</text>", re.DOTALL)
INNERMOST = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")
DROPPED = re.compile(
    r"<!--.*?-->|<ref[^>]*/>|<(ref|math|table|div|gallery|pre|timeline)\b.*?</\1>"
    r"|\[\[(?:[a-z]{2,3}|simple|zh-\w+|image|file|category|media):[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]",
    re.DOTALL | re.IGNORECASE,
)
KEPT = (
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]"), r"\1"),  # a link's words
    (re.compile(r"\[\w+://\S+ ?([^\]]*)\]"), r"\1"),
    (re.compile(r"</?[a-zA-Z][^>]*>"), " "),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"^=+[^=\n]*=+\s*$|^[|!{].*$", re.MULTILINE), " "),  # headings, rows of tables
    (re.compile(r"^[*#:;]+", re.MULTILINE), ""),
)


def articles(dump: str, least: int = 500) -> list[str]:
    """The texts of a dump of Wikipedia that are at least so many characters long, without markup, roughly."""
    found = []
    for raw in ARTICLE.findall(dump):
        if raw.lower().startswith("#redirect"):
            continue
        text = html.unescape(html.unescape(raw))
        for _ in range(4):  # templates stand in templates
            text = INNERMOST.sub(" ", text)
        text = DROPPED.sub(" ", text)
        for pattern, words in KEPT:
            text = pattern.sub(words, text)
        text = " ".join(text.split())
        if len(text) >= least:
            found.append(text)
    return found
