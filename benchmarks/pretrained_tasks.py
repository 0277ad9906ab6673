"""The models and tasks of benchmarks/pretrained.py, over what `prepare` wrote: how each answers and is judged."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pretrained_data import DIGITS, RATE
from safetensors.torch import load_file
from torch import Tensor

from clusterattn.measure.tasks import edits

Figures = dict[str, float]


def hidden_error(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact.double()).norm() / exact.double().norm())


def spread(rows: int, limit: int | None) -> Tensor:
    """Which rows to take: all, or so many spread evenly."""
    return torch.arange(rows) if limit is None or limit >= rows else torch.arange(limit) * rows // limit


def between(rows: int, limit: int | None, count: int) -> Tensor:
    """So many rows that ``spread`` does not take, spread evenly too."""
    taken = set(spread(rows, limit).tolist())
    others = torch.tensor([row for row in range(rows) if row not in taken], dtype=torch.int64)
    if len(others) < count:
        raise SystemExit(f"--tune wants {count} examples that are not judged: --limit {rows - count} or less")
    return others[spread(len(others), count)]


class Task:
    """``part`` is what is swapped, ``answer`` runs the model, ``judge`` compares with exact attention's answer."""

    causal: ClassVar[bool] = False
    exact_below = 0
    length: int
    heads: int
    examples: str
    part: Any

    def __init__(self, folder: Path, kind: str, device: str) -> None:
        import transformers

        self.device = device
        self.model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval().to(device)
        self.data = load_file(folder / "data.safetensors")

    def answer(self) -> Any:
        raise NotImplementedError

    def judge(self, mine: Any, exact: Any) -> Figures:
        raise NotImplementedError

    def held_out(self) -> list[dict[str, Tensor]]:
        """Inputs of ``part`` that are not judged, for ``ca.tune``."""
        raise SystemExit(f"--tune: {type(self).__name__} keeps no examples for it")


class Passages(Task):
    """MiniLM on full windows: mean-pooled embeddings by cosine, and the hidden states."""

    length, heads = 512, 12

    def __init__(self, prepared: Path, device: str, limit: int | None) -> None:
        super().__init__(prepared / "minilm", "AutoModel", device)
        self.part = self.model
        rows, self.limit = self.data["passages"], limit
        self.ids = rows[spread(len(rows), limit)].long()
        self.examples = f"{len(self.ids)} passages of {self.length} tokens, IMDB and ten books"

    def answer(self) -> Tensor:
        return torch.cat([self.model(ids.to(self.device)).last_hidden_state.cpu() for ids in self.ids.split(8)])

    def judge(self, mine: Tensor, exact: Tensor) -> Figures:
        a, b = (F.normalize(x.double().mean(1), dim=-1) for x in (mine, exact))
        return {"distance": float((a - b).square().sum(-1).mean() / 2), "hidden": hidden_error(mine, exact)}

    def held_out(self) -> list[dict[str, Tensor]]:
        rows = self.data["passages"]
        ids = rows[between(len(rows), self.limit, 8)].long().to(self.device)
        return [{"input_ids": some} for some in ids.split(4)]

    @staticmethod
    def embeddings(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return F.normalize(model(**batch).last_hidden_state.mean(1), dim=-1)


class Retrieval(Task):
    """XQuAD: the paragraph of each question among all, by MiniLM. Questions are short and stay exact."""

    length, heads, exact_below = 256, 12, 64

    def __init__(self, prepared: Path, device: str, limit: int | None) -> None:
        super().__init__(prepared / "minilm", "AutoModel", device)
        self.part = self.model
        few = len(self.data["paragraphs"]) if limit is None else limit
        self.asked = self.data["answers"] < few
        self.answers = self.data["answers"][self.asked]
        self.rows = {"paragraphs": slice(0, few), "questions": self.asked}
        self.examples = f"{len(self.answers)} questions of XQuAD, {few} paragraphs"

    def answer(self) -> tuple[Tensor, Tensor]:
        return self.embed("questions"), self.embed("paragraphs")

    def embed(self, what: str) -> Tensor:
        ids, lengths = (self.data[name][self.rows[what]].long() for name in (what, what + "_lengths"))
        order = lengths.argsort()
        found = torch.empty(len(ids), self.model.config.hidden_size)
        for some in order.split(16):
            longest = int(lengths[some].max())
            real = (torch.arange(longest) < lengths[some, None]).to(self.device)
            hidden = self.model(ids[some, :longest].to(self.device), attention_mask=real.long()).last_hidden_state
            pooled = (hidden * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
            found[some] = F.normalize(pooled, dim=-1).cpu()
        return found

    def judge(self, mine: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> Figures:
        questions, paragraphs = mine
        right = (questions @ paragraphs.T).argmax(-1) == self.answers
        distance = (paragraphs - exact[1]).double().square().sum(-1).mean() / 2
        return {"top1": float(right.double().mean()), "distance": float(distance)}


class Speech(Task):
    """Whisper tiny.en: its encoder's attention is swapped; the decoder is exact, greedy, without timestamps."""

    length, heads = 1500, 6
    START, END, MOST = (50257, 50362), 50256, 224
    FIRST = (220, 50256)  # neither a blank nor nothing at all comes first
    SYMBOLS = '"#()*+/:;<=>@[\\]^_`{|}~「」『』♩♪♫♬♭♮♯'  # not speech: never said, as OpenAI's own decoder has it

    def __init__(self, prepared: Path, device: str, limit: int | None) -> None:
        from transformers import WhisperFeatureExtractor

        folder = prepared / "whisper"
        super().__init__(folder, "WhisperForConditionalGeneration", device)
        self.part = self.model.model.encoder
        clips, self.limit = self.data["audio"].split(self.data["lengths"].tolist()), limit
        references = json.loads((folder / "references.json").read_text())
        at = spread(len(clips), limit).tolist()
        self.words = [plain_words(references[i][1]) for i in at]
        self.kinds = [references[i][0] for i in at]
        self.extract, self.clips = WhisperFeatureExtractor(), clips
        self.features = self.heard(at)
        lines = (folder / "gpt2.tiktoken").read_text().split("\n")
        self.pieces = [base64.b64decode(line.split()[0]) for line in lines if line]
        said = (piece.decode(errors="replace").strip() for piece in self.pieces)
        self.never = [i for i, text in enumerate(said) if text and all(letter in self.SYMBOLS for letter in text)]
        kinds = ", ".join(f"{self.kinds.count(kind)} of {kind}" for kind in dict.fromkeys(self.kinds))
        self.examples = f"{len(at)} clips ({kinds}), {sum(map(len, self.words))} words"

    def heard(self, at: list[int]) -> Tensor:
        sounds = ((self.clips[i].float() / 32768).numpy() for i in at)
        features = [self.extract(sound, sampling_rate=RATE).input_features[0] for sound in sounds]
        return torch.stack([torch.as_tensor(each) for each in features])

    def held_out(self) -> list[dict[str, Tensor]]:
        features = self.heard(between(len(self.clips), self.limit, 4).tolist()).to(self.device)
        return [{"input_features": some} for some in features.split(2)]

    def answer(self) -> tuple[Tensor, list[list[str]]]:
        hidden, said = [], []
        for some in self.features.split(8):
            heard = self.part(some.to(self.device)).last_hidden_state
            hidden.append(heard.cpu())
            said += self.transcribe(heard)
        return torch.cat(hidden), said

    def transcribe(self, heard: Tensor) -> list[list[str]]:
        """The likeliest next token, one after the other."""
        tokens, past, found = torch.tensor(self.START, device=self.device).repeat(len(heard), 1), None, []
        over = torch.zeros(len(heard), dtype=torch.bool, device=self.device)
        for step in range(self.MOST):
            out = self.model.model.decoder(
                input_ids=tokens, encoder_hidden_states=heard, past_key_values=past, use_cache=True
            )
            past = out.past_key_values
            logits = self.model.proj_out(out.last_hidden_state[:, -1])
            logits[:, self.START[0] :] = logits[:, self.never] = -math.inf
            if step == 0:
                logits[:, self.FIRST] = -math.inf
            following = logits.argmax(-1).masked_fill(over, self.END)
            over |= following == self.END
            found.append(following)
            if bool(over.all()):
                break
            tokens = following.unsqueeze(-1)
        rows = torch.stack(found, 1).tolist()
        texts = (b"".join(self.pieces[token] for token in row if token < self.END) for row in rows)
        return [unlooped(plain_words(text.decode(errors="replace"))) for text in texts]

    def judge(self, mine: tuple[Tensor, list[list[str]]], exact: tuple[Tensor, list[list[str]]]) -> Figures:
        (hidden, said), (truth, theirs) = mine, exact
        figures = {"wer": rate(self.words, said), "changed": rate(theirs, said), "hidden": hidden_error(hidden, truth)}
        for kind in dict.fromkeys(self.kinds):
            some = [i for i, each in enumerate(self.kinds) if each == kind]
            figures[f"wer_{kind}"] = rate([self.words[i] for i in some], [said[i] for i in some])
        return figures


def plain_words(text: str) -> list[str]:
    """Lower case, no punctuation, digits one by one as words."""
    text = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", text.lower())
    return re.sub(r"[^a-z' ]", " ", text).split()


def unlooped(words: list[str], longest: int = 8, often: int = 5) -> list[str]:
    """Greedy decoding may run in a circle to its last token (exact attention's too): what it says again and again up to
    the end counts once. The published decoder starts over with another temperature, which would add chance."""
    for period in range(1, longest + 1):
        times = 1
        while words[: len(words) - times * period][-period:] == words[-period:] and times * period < len(words):
            times += 1
        if times >= often:
            return words[: len(words) - (times - 1) * period]
    return words


def rate(wanted: list[list[str]], got: list[list[str]]) -> float:
    """Words to insert, delete or replace, per word wanted."""
    return sum(map(edits, wanted, got)) / max(sum(map(len, wanted)), 1)


class Books(Task):
    """SmolLM2-135M over the beginnings of ten books. The second half is judged: there the past is long."""

    causal, heads = True, 9
    AT_ONCE = 512  # rows of next-token distributions: the vocabulary is wide

    def __init__(self, length: int, prepared: Path, device: str, limit: int | None) -> None:
        super().__init__(prepared / "smollm2", "AutoModelForCausalLM", device)
        self.part, self.length = self.model.model, length
        rows = self.data["books"]
        self.ids = rows[spread(len(rows), limit), :length].long()
        self.examples = f"{len(self.ids)} books, {length} tokens each, the second half judged"

    def answer(self) -> Tensor:
        found = [self.part(ids.unsqueeze(0).to(self.device), use_cache=False).last_hidden_state for ids in self.ids]
        return torch.cat(found).cpu()

    def judge(self, mine: Tensor, exact: Tensor) -> Figures:
        apart = loss = 0.0
        half = self.length // 2
        for ids, ours, theirs in zip(self.ids, mine, exact, strict=True):
            for at in torch.arange(half, self.length - 1).split(self.AT_ONCE):
                q, p = (self.model.lm_head(x[at].to(self.device)).log_softmax(-1) for x in (ours, theirs))
                apart += float((p.exp() * (p - q)).sum())
                loss += float(F.nll_loss(q, ids[at + 1].to(self.device), reduction="sum"))
        count = len(self.ids) * (self.length - 1 - half)
        hidden = hidden_error(mine[:, half:], exact[:, half:])
        return {"kl": max(apart / count, 0.0), "perplexity": math.exp(loss / count), "hidden": hidden}


TASKS: dict[str, Callable[[Path, str, int | None], Task]] = {
    "minilm": Passages,
    "xquad": Retrieval,
    "whisper": Speech,
    **{f"smollm2-{length}": partial(Books, length) for length in (2048, 4096, 8192)},
}
