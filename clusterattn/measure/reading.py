"""The user's data from disk: passages, labelled passages, speech with transcripts. Standard library and torch only."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .._errors import bad_value

T = TypeVar("T")
FORMATS = "a text file, .tsv (label<tab>text), .jsonl (text, label) or a folder of them"
SPEECH = "a folder of .wav files with a .txt transcript beside each, or transcripts.tsv (name<tab>words)"


@dataclass(frozen=True)
class Example:
    """One thing to show a model, and what is known about it."""

    text: str = ""  # the passage; of speech, its transcript
    label: str | None = None
    sound: Tensor | None = None  # (samples,), mono, between -1 and 1
    rate: int = 0
    name: str = ""


def passages(path: str | Path, *, whole: bool, labelled: bool = False) -> list[Example]:
    """Passages of a file or of all files of a folder. ``whole``: a text file is one passage, else each line is one."""
    path = Path(path)
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix in (".txt", ".tsv", ".jsonl"))
        if not files:
            raise bad_value(FORMATS, f"{path}, a folder without any", "a folder with .txt files")
    elif path.is_file():
        files = [path]
    else:
        raise bad_value(FORMATS, f"{path}, which is not there", "the path of an existing file")
    found = [example for file in files for example in _examples(file, whole, labelled)]
    if not found:
        raise bad_value("at least one passage", f"none in {path}", "a file with text in it")
    return found


def _examples(file: Path, whole: bool, labelled: bool) -> Iterator[Example]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_value(f"UTF-8 text in {file}", f"byte {error.start} that is none", "converting it first") from None
    if file.suffix != ".jsonl" and file.suffix != ".tsv" and whole and not labelled:
        yield from [Example(text, name=file.name)] if text.strip() else []
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file.name} line {number}"
        if file.suffix == ".jsonl":
            example = _from_json(line, where)
        elif file.suffix == ".tsv" or labelled:
            label, tab, rest = line.partition("\t")
            if not tab or not rest.strip():
                raise bad_value("label<tab>text on every line", f"{where}: {line[:40]!r}", "a tab after the label")
            example = Example(rest.strip(), label.strip(), name=where)
        else:
            example = Example(line.strip(), name=where)
        if labelled and example.label is None:
            raise bad_value('a "label" with every text', f"{where} without one", '{"text": …, "label": …}')
        yield example


def _from_json(line: str, where: str) -> Example:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise bad_value("one JSON object per line", f"{where}: {error.msg}", "removing that line") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        raise bad_value('objects with a "text"', f"{where}: {line[:40]}", '{"text": "…"}')
    label = found.get("label")
    return Example(found["text"], None if label is None else str(label), name=where)


def speech(path: str | Path) -> list[Example]:
    """The .wav files of a folder with their transcripts; or a .jsonl of objects with "audio" (a path) and "text"."""
    path = Path(path)
    if path.is_file() and path.suffix == ".jsonl":
        return [_clip(path.parent / audio, words) for audio, words in _listed(path)]
    if not path.is_dir():
        raise bad_value(SPEECH, f"{path}, which is no folder", "the path of an existing folder")
    clips = sorted(path.rglob("*.wav"))
    if not clips:
        raise bad_value(SPEECH, f"{path}, without any .wav", "a folder of 16-bit .wav files")
    table = path / "transcripts.tsv"
    spoken = {example.label: example.text for example in passages(table, whole=False, labelled=True)} \
        if table.is_file() else {}  # fmt: skip
    found = []
    for clip in clips:
        beside = clip.with_suffix(".txt")
        words = spoken.get(clip.name) or spoken.get(clip.stem)
        if words is None and beside.is_file():
            words = beside.read_text(encoding="utf-8")
        if words is None:
            raise bad_value(SPEECH, f"{clip.name} without a transcript", f"{beside.name} or a line in {table.name}")
        found.append(_clip(clip, words))
    return found


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    for example in path.read_text(encoding="utf-8").split("\n"):
        if example.strip():
            try:
                found = json.loads(example)
                yield str(found["audio"]), str(found["text"])
            except (json.JSONDecodeError, KeyError, TypeError):
                wanted = 'objects with "audio" and "text"'
                raise bad_value(wanted, f"{path.name}: {example[:40]}", "one object per line") from None


def _clip(path: Path, words: str) -> Example:
    sound, rate = read_wav(path)
    return Example(words.strip(), sound=sound, rate=rate, name=path.name)


def read_wav(path: str | Path) -> tuple[Tensor, int]:
    """Mono samples between -1 and 1, and their rate. 8 or 16 or 32 bits of PCM, any number of channels."""
    if not Path(path).is_file():
        raise bad_value("a .wav file", f"{path}, which is not there", "its whole path")
    try:
        with wave.open(str(path), "rb") as file:
            wide, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        got = f"{path} ({str(error) or 'cut off'})"
        raise bad_value("a PCM .wav file", got, "16-bit PCM, for instance by sox or ffmpeg") from None
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    if wide not in kinds:
        raise bad_value("8, 16 or 32 bits a sample", f"{8 * wide} in {path}", "16-bit PCM")
    if not data:
        raise bad_value("a .wav file with sound in it", f"{path}, which is empty", "leaving it out")
    if len(data) % (wide * channels):
        raise bad_value("a whole .wav file", f"{path}, which is cut off", "copying it again")
    sound = torch.frombuffer(bytearray(data), dtype=kinds[wide]).double()
    sound = (sound - 128) / 128 if wide == 1 else sound / 2 ** (8 * wide - 1)
    return sound.view(-1, channels).mean(-1).float(), rate


def resampled(sound: Tensor, rate: int, wanted: int) -> Tensor:
    """The same sound at another rate: its spectrum, cut or filled up with silence."""
    if rate == wanted:
        return sound
    length = max(1, round(len(sound) * wanted / rate))
    spectrum = torch.fft.rfft(sound.double())
    kept = torch.zeros(length // 2 + 1, dtype=spectrum.dtype)
    both = min(len(kept), len(spectrum))
    kept[:both] = spectrum[:both]
    back: Tensor = torch.fft.irfft(kept, length) * (length / len(sound))
    return back.float()


def spread(items: list[T], limit: int | None) -> list[T]:
    """At most ``limit`` of them, evenly over the whole: the first pages of a book are not like the rest."""
    if limit is None or limit >= len(items):
        return items
    return [items[(2 * i + 1) * len(items) // (2 * limit)] for i in range(limit)]
