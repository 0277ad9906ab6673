"""Words as numbers: lower-cased words and punctuation, a start from published word vectors, kept tokenizers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clusterattn._errors import bad_value
from clusterattn._extras import need
from clusterattn._files import write_whole

PADDING, UNKNOWN = 0, 1
SPECIAL = ("<padding>", "<unknown>")
MOST = 50_000
ABOUT, TOKENIZER = "task.json", "tokenizer.json"  # in the folder of a saved task
PIECE = re.compile(r"n't|'(?:s|re|ve|ll|d|m)\b|\w+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """ "Don't stop." -> do n't stop ."""
    return PIECE.findall(text.lower().replace("’", "'").replace("n't", " n't"))


@dataclass(frozen=True)
class Vectors:
    """Published word vectors (GloVe and the like): words and (words d)."""

    words: dict[str, int]
    values: Tensor

    @classmethod
    def load(cls, path: Path | str) -> Vectors:
        """An .npz with ``vectors`` (words d) and ``words``, joined by newlines."""
        numpy = need("numpy", "train")
        with numpy.load(path) as file:
            if not {"vectors", "words"} <= set(file.files):
                raise bad_value(f"vectors and words in {path}", ", ".join(file.files), "numpy.savez(vectors=, words=)")
            words, values = str(file["words"]).split("\n"), torch.from_numpy(file["vectors"].astype("float32"))
        if len(words) != len(values):
            raise bad_value(f"a vector for each word in {path}", f"{len(words)} words, {len(values)} vectors", "both")
        return cls({word: at for at, word in enumerate(words)}, values)

    def of(self, word: str) -> Tensor | None:
        at = self.words.get("not" if word == "n't" else word)
        return None if at is None else self.values[at]


@dataclass(frozen=True)
class Vocabulary:
    words: Sequence[str]  # SPECIAL first
    index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {word: at for at, word in enumerate(self.words)})

    def __len__(self) -> int:
        return len(self.words)

    @classmethod
    def of(
        cls, texts: Iterable[Sequence[str]], *, most: int = MOST, least: int = 1, also: Iterable[str] = ()
    ) -> Vocabulary:
        """The ``most`` frequent words of cut texts that stand there ``least`` times, and ``also``."""
        counts: Counter[str] = Counter()
        for words in texts:
            counts.update(words)
        kept = dict.fromkeys(SPECIAL)
        kept |= dict.fromkeys(word for word, count in counts.most_common(most) if count >= least)
        kept |= dict.fromkeys(sorted(set(also)))
        return cls(tuple(kept))

    def numbers(self, words: Sequence[str]) -> Tensor:
        """(n) int32, of a cut text; one without a word is one unknown word, so that attention has something to see."""
        known = self.index
        return torch.tensor([known.get(word, UNKNOWN) for word in words] or [UNKNOWN], dtype=torch.int32)

    def start(self, vectors: Vectors, seed: int = 0) -> Tensor:
        """(words d): a published vector where there is one, else a draw of the same spread."""
        dice = torch.Generator().manual_seed(seed)
        d = vectors.values.shape[1]
        table = torch.randn(len(self), d, generator=dice) * vectors.values.std()
        for at, word in enumerate(self.words):
            known = vectors.of(word)
            if known is not None:
                table[at] = known
        table[PADDING] = 0
        return table

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps({"words": list(self.words)}, ensure_ascii=False))

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        return cls(tuple(json.loads(Path(path).read_text(encoding="utf-8"))["words"]))


def keep_tokenizer(folder: Path, tokenizer: Any, length: int) -> None:
    """What a task in word pieces needs to read new texts: its tokenizer, and where it cuts them."""
    write_whole(Path(folder) / ABOUT, json.dumps({"length": length}))
    write_whole(Path(folder) / TOKENIZER, tokenizer.to_str())


def kept_tokenizer(folder: Path) -> tuple[Any, int]:
    about = json.loads((Path(folder) / ABOUT).read_text(encoding="utf-8"))
    return need("tokenizers", "train").Tokenizer.from_file(str(Path(folder) / TOKENIZER)), int(about["length"])
