"""Speech to phones or letters by CTC: CMU AN4 with utterances joined to long inputs, or a folder of .wav and .txt."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn._files import write_whole
from clusterattn.measure.reading import read_wav, text_of
from clusterattn.measure.tasks import edits
from clusterattn.methods import MethodSpec

from ..models.speech import SpeechEncoder
from ._task import Batch, Figures, Task, padded, several

BANDS = 40  # mel bands of a user's own recordings, as many as the paper had
HOP = 0.01  # seconds between frames
WINDOW = 0.025
HELD_OUT = 10  # one speaker (or recording) in so many is the dev set
SPELLED = {"A": "EY"}  # AN4's dictionary lists the article first, but every A of its transcripts is a spelled letter


class Recording(NamedTuple):
    frames: Tensor  # (n features)
    symbols: Tensor  # what is said, as numbers


class Joined(Sequence[Recording]):
    """Recordings that are played one after the other; joined only when asked for, so many joinings cost no memory."""

    def __init__(self, recordings: Sequence[Recording], groups: Sequence[Sequence[int]]) -> None:
        self.recordings, self.groups = recordings, groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, at: Any) -> Any:
        parts = [self.recordings[each] for each in self.groups[at]]
        return Recording(torch.cat([part.frames for part in parts]), torch.cat([part.symbols for part in parts]))

    def by_length(self) -> Joined:
        """The same, the shortest first."""
        lengths = [sum(len(self.recordings[at].frames) for at in group) for group in self.groups]
        order = sorted(range(len(self)), key=lengths.__getitem__)
        return Joined(self.recordings, [self.groups[at] for at in order])


class Speech(Task):
    """Best-path CTC over phones."""

    name = "speech"
    figure = "phone error rate"
    better = "lower"

    def __init__(
        self,
        splits: dict[str, Sequence[Recording]],
        symbols: Sequence[str],
        features: int,
        *,
        rate: int = 0,
        length: int = 800,
    ) -> None:
        """rate: samples per second of the recordings that made the features; 0 where they came as features."""
        self.splits, self.symbols = splits, list(symbols)
        self.features, self.rate, self.longest = features, rate, length

    @classmethod
    def an4(cls, folder: Path, *, frames: int = 780, joinings: int = 1, judged: int = 1, seed: int = 0) -> Speech:
        """CMU AN4: dev is every tenth training speaker, test the official one.

        frames    mean of the joined inputs; 0 leaves utterances as they are
        joinings  how many times all training utterances are joined, differently: one epoch sees each of them
        judged    the same for dev and test
        """
        symbols, by_speaker = an4_recordings(folder)
        spoken = {split: [each for _, each in found] for split, found in by_speaker.items()}
        splits: dict[str, Sequence[Recording]] = dict(spoken)
        if frames:
            splits["train"] = joined(spoken["train"], frames, joinings, seed)
            for split in ("dev", "test"):  # the same for all seeds, and with like lengths side by side
                splits[split] = joined(spoken[split], frames, judged, 0).by_length()
        return cls(splits, symbols, features=3 * CEPSTRA, length=frames or 268)

    # ------------------------------------------------------------------ a user's own recordings

    @classmethod
    def read(cls, data: Path, *, length: int | None = None, seed: int = 0) -> Speech:
        """A folder of PCM .wav files, each with a .txt of the same name beside it; or AN4.

        The symbols are letters, or phones where there is a dictionary: one .dic file of lines "WORD P1 P2 ...".
        Sub-folders train, dev and test are taken for that; without them every tenth recording (by ``seed``) is dev.
        Recordings of more than ``length`` frames (100 a second) are left out.
        """
        data = Path(data)
        if any((data / each / AN4_TRAIN).exists() for each in ("", "an4")):
            return cls.an4(data, seed=seed)
        found = sorted(data.rglob("*.wav"))
        spoken = [path for path in found if path.with_suffix(".txt").exists()]
        if len(spoken) < 2:
            got = f"{len(found)} .wav, {len(spoken)} of them with a .txt beside it, in {data}"
            raise bad_value("a folder with pairs of one.wav and one.txt", got, "one transcript for each recording")
        texts, kind = transcripts(data, spoken)
        symbols = sorted({symbol for text in texts.values() for symbol in text})
        known = {symbol: at for at, symbol in enumerate(symbols)}
        rate = read_wav(spoken[0])[1]
        turns = torch.randperm(len(spoken), generator=torch.Generator().manual_seed(seed)).tolist()
        in_parts, longer = (data / "train").is_dir(), 0
        splits: dict[str, list[Recording]] = {"train": [], "dev": []}
        for path, turn in zip(spoken, turns, strict=True):
            frames = loudness(path, rate)
            if length is not None and len(frames) > length:
                longer += 1
                continue
            split = path.relative_to(data).parts[0] if in_parts else "train" if turn % HELD_OUT else "dev"
            numbers = torch.tensor([known[symbol] for symbol in texts[path]], dtype=torch.long)
            splits.setdefault(split, []).append(Recording(frames, numbers))
        if longer:
            wording = f"{longer} of {len(spoken)} recordings have more than {length} frames and are left out"
            warnings.warn(wording, stacklevel=2)
        for split in ("train", "dev"):
            if not splits[split]:
                raise bad_value(f"recordings for {split}", f"none in {data}", f"a folder {split}/, or more of them")
        longest = max(len(each.frames) for each in splits["train"])
        return kind(dict(splits), symbols, features=BANDS, rate=rate, length=longest)

    def save(self, folder: Path) -> None:
        about = {"symbols": self.symbols, "features": self.features, "rate": self.rate, "length": self.longest}
        written = json.dumps({"figure": self.figure, **about}, ensure_ascii=False)
        write_whole(Path(folder) / "speech.json", written)

    @classmethod
    def restore(cls, folder: Path) -> Speech:
        about = json.loads((Path(folder) / "speech.json").read_text(encoding="utf-8"))
        kind = Spelled if about.pop("figure") == Spelled.figure else Speech
        return kind({}, **about)

    def predict(self, model: nn.Module, inputs: Sequence[Any]) -> list[str]:
        """inputs: .wav files (or Sphinx .mfc files where the task came from AN4), or frames as tensors."""
        heard = [each if isinstance(each, Tensor) else self.listen(Path(each)) for each in several(inputs)]
        device, training = next(model.parameters()).device, model.training
        model.eval()
        answers = []
        with torch.no_grad():
            for frames in heard:
                mask = torch.ones(1, len(frames), dtype=torch.bool, device=device)
                answers += best_paths(model(frames.unsqueeze(0).to(device), mask).logits, mask)
        model.train(training)
        return [self.between.join(self.symbols[at] for at in answer) for answer in answers]

    between = " "

    def listen(self, path: Path) -> Tensor:
        return loudness(path, self.rate) if self.rate else with_changes(an4_cepstra(path))

    # ------------------------------------------------------------------ the task

    def model(self, method: MethodSpec, **sizes: Any) -> SpeechEncoder:
        return SpeechEncoder(method, self.features, len(self.symbols), **{"length": self.longest, **sizes})

    def length(self, example: Recording) -> int:
        return len(example.frames)

    def collate(self, examples: Sequence[Recording]) -> Batch:
        frames, mask = padded([each.frames for each in examples])
        symbols, symbol_mask = padded([each.symbols.long() for each in examples])
        return {"frames": frames, "mask": mask, "symbols": symbols, "symbol_mask": symbol_mask}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed over recordings; counted in symbols."""
        answer = model(batch["frames"], batch["mask"])
        total, count = ctc(answer.logits, batch)
        return total + answer.auxiliary * count, count

    def judge(self, model: nn.Module, batches: Iterable[Batch]) -> Figures:
        wrong, wanted, loss = 0, 0, 0.0
        for batch in batches:
            answer = model(batch["frames"], batch["mask"])
            total, count = ctc(answer.logits, batch)
            loss, wanted = loss + total.item(), wanted + int(count)
            wrong += mistakes(answer.logits, batch)
        return {self.figure: wrong / max(wanted, 1), "nll": loss / max(wanted, 1)}


class Spelled(Speech):
    """The same over the letters of a user's transcripts."""

    figure = "character error rate"
    between = ""


def transcripts(data: Path, spoken: Sequence[Path]) -> tuple[dict[Path, list[str]], type[Speech]]:
    """The symbols of every recording: letters, or phones by the folder's dictionary."""
    transcripts = {path: text_of(path.with_suffix(".txt")).split() for path in spoken}
    dictionary = next(iter(sorted(data.glob("*.dic"))), None)
    if dictionary is None:
        return {path: list(" ".join(words)) for path, words in transcripts.items()}, Spelled
    phones = pronunciations(dictionary)
    missing = sorted({word for words in transcripts.values() for word in words} - set(phones))
    if missing:
        raise bad_value(f"every word in {dictionary.name}", f"none for {missing[:5]}", "adding a line for each")
    return {path: [phone for word in words for phone in phones[word]] for path, words in transcripts.items()}, Speech


def ctc(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The negative log-likelihood of what is said, summed, and the number of its symbols."""
    count = batch["symbol_mask"].sum().clamp(min=1)
    odds = logits.float().log_softmax(-1).transpose(0, 1)
    total = F.ctc_loss(
        odds,
        batch["symbols"],
        batch["mask"].sum(1),
        batch["symbol_mask"].sum(1),
        blank=odds.shape[-1] - 1,
        reduction="sum",
        zero_infinity=True,  # where there are more symbols than frames, no path leads to them
    )
    return total, count


def best_paths(logits: Tensor, mask: Tensor) -> list[list[int]]:
    """The likeliest symbol of every frame; repetitions said once, blanks not at all."""
    blank = logits.shape[-1] - 1
    path = logits.argmax(-1).masked_fill(~mask, blank)
    fresh = path != F.pad(path, (1, 0), value=blank)[:, :-1]
    kept = fresh & (path != blank)
    return [row[keep].tolist() for row, keep in zip(path.cpu(), kept.cpu(), strict=True)]


def mistakes(logits: Tensor, batch: Batch) -> int:
    """Symbols of the best paths to insert, delete or replace."""
    lengths = batch["symbol_mask"].sum(1).tolist()
    truth = [row[:length] for row, length in zip(batch["symbols"].tolist(), lengths, strict=True)]
    return sum(map(edits, truth, best_paths(logits, batch["mask"])))


def joined(recordings: Sequence[Recording], frames: int, times: int, seed: int) -> Joined:
    """Every recording once in each of ``times`` joinings, in a random order, in inputs of ``frames`` on average.

    How long each input shall be is drawn with a tail: from 0.4 to 3.2 times the mean, as the paper's (2500 of 780).
    """
    dice = torch.Generator().manual_seed(seed)
    groups: list[list[int]] = []
    for _ in range(times):
        have, want = 0.0, 0.0
        for at in torch.randperm(len(recordings), generator=dice).tolist():
            length = len(recordings[at].frames)
            if 2 * have + length >= 2 * want:  # with this one it would be further from what is wanted than without
                have, want = 0.0, frames * min(0.4 - 0.6 * torch.rand((), generator=dice).log().item(), 3.2)
                groups.append([])
            groups[-1].append(at)
            have += length
    return Joined(recordings, groups)


# ---------------------------------------------------------------------------------------------------- CMU AN4

CEPSTRA = 13
AN4_TRAIN = Path("etc") / "an4_train.fileids"


def an4_root(folder: Path) -> Path:
    for found in (Path(folder), Path(folder) / "an4"):
        if (found / AN4_TRAIN).exists():
            return found
    raise bad_value("CMU AN4: etc/an4_train.fileids and feat/", str(folder), "the folder an4 of the unpacked archive")


def an4_recordings(folder: Path) -> tuple[list[str], dict[str, list[tuple[str, Recording]]]]:
    """The phones; and by split, each with its speaker, the utterances: dev is every tenth training speaker."""
    folder = an4_root(folder)
    symbols, phones_of = an4_dictionary(folder)
    known = {symbol: at for at, symbol in enumerate(symbols)}
    spoken: dict[str, list[tuple[str, Recording]]] = {"train": [], "dev": [], "test": []}
    for part in ("train", "test"):
        utterances = list(an4_utterances(folder, part))
        speakers = sorted({name.split("/")[-2] for name, _ in utterances})
        for name, words in utterances:
            speaker = name.split("/")[-2]
            dev = part == "train" and speakers.index(speaker) % HELD_OUT == HELD_OUT // 2
            heard = with_changes(an4_cepstra(folder / "feat" / f"{name}.mfc"))
            phones = torch.tensor([known[phone] for word in words for phone in phones_of[word]])
            spoken["dev" if dev else part].append((speaker, Recording(heard, phones)))
    return symbols, spoken


def an4_dictionary(folder: Path) -> tuple[list[str], dict[str, list[str]]]:
    """The phones without silence, and the phones of each word: its first pronunciation."""
    phones_of = pronunciations(folder / "etc" / "an4.dic") | {word: phones.split() for word, phones in SPELLED.items()}
    return sorted({phone for phones in phones_of.values() for phone in phones}), phones_of


def pronunciations(dictionary: Path) -> dict[str, list[str]]:
    """The phones of each word: lines "WORD P1 P2 ...". A variant, A(2), is a word of its own which nobody says."""
    lines = (line.split() for line in text_of(dictionary).splitlines())
    return {line[0]: line[1:] for line in lines if line}


def an4_utterances(folder: Path, part: str) -> Iterator[tuple[str, list[str]]]:
    """The file's name, from the speaker's folder on, and the words of every utterance."""
    names = (folder / "etc" / f"an4_{part}.fileids").read_text().split()
    lines = (folder / "etc" / f"an4_{part}.transcription").read_text().splitlines()
    for name, line in zip(names, lines, strict=True):
        words, _, of = line.rstrip(") ").rpartition("(")
        if of != name.split("/")[-1]:
            raise bad_value(f"the transcript of {name}", f"that of {of}", "the archive as it was published")
        yield name, words.split()


def an4_cepstra(path: Path) -> Tensor:
    """Sphinx's features (n 13): a big-endian count, then as many big-endian floats."""
    flipped = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(-1, 4).flip(1).contiguous()
    count, values = int(flipped[0].view(torch.int32)), flipped[1:].reshape(-1).view(torch.float32)
    if count != len(values) or count % CEPSTRA:
        got = f"a count of {count} before {len(values)} numbers in {path.name}"
        raise bad_value(f"a big-endian count, then frames of {CEPSTRA} numbers", got, "Sphinx .mfc files")
    return values.view(-1, CEPSTRA)


def normalised(frames: Tensor) -> Tensor:
    """Mean 0 and variance 1 in every band of a recording: the microphone and the voice's pitch taken out."""
    return (frames - frames.mean(0)) / frames.std(0, unbiased=False).clamp(min=1e-3)


def with_changes(frames: Tensor) -> Tensor:
    """Normalised frames, how they change, and how that changes: (n 3 bands)."""
    frames = normalised(frames)
    first = changes(frames)
    return torch.cat([frames, first, changes(first)], -1)


def changes(frames: Tensor) -> Tensor:
    """The slope of a line through five frames, with the ends held."""
    held = F.pad(frames.T.unsqueeze(0), (2, 2), mode="replicate")
    slope = torch.arange(-2.0, 3.0).view(1, 1, 5) / 10
    return F.conv1d(held.transpose(0, 1), slope).squeeze(1).T


# ---------------------------------------------------------------------------------------------------- .wav files


def loudness(path: Path, rate: int) -> Tensor:
    """(n BANDS): the logarithm of the energy in mel bands every 10 ms, normalised."""
    heard, own = read_wav(path)
    if own != rate:
        raise bad_value(f".wav files of one rate ({rate} Hz)", f"{own} Hz in {path.name}", f"ffmpeg -ar {rate}")
    hop, window = round(HOP * rate), round(WINDOW * rate)
    size = 2 ** math.ceil(math.log2(window))
    heard = F.pad(heard, (0, max(size - len(heard), 0)))
    shape = torch.hann_window(window)
    power = torch.stft(heard, size, hop, window, shape, return_complex=True, pad_mode="constant").abs().square()
    return normalised((mel(rate, size) @ power + 1e-10).log().T)


@functools.lru_cache
def mel(rate: int, size: int) -> Tensor:
    """(BANDS, size // 2 + 1): triangles, evenly spread on the mel scale up to half the rate."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, BANDS + 2) / 2595) - 1)
    at = torch.linspace(0, rate / 2, size // 2 + 1)
    rising = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0)
