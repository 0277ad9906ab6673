"""The user's data from disk: text in any common encoding, passages, labelled passages, speech with transcripts.

The only reader of users' text and sound: `approximate`, `tune` and what trains share it.
"""

from __future__ import annotations

import codecs
import gzip
import json
import lzma
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._errors import bad_value

T = TypeVar("T")
MOST_FAULTS = 20  # lines of a file that one message lists
FORMATS = "a text file, .tsv (label<tab>text), .jsonl (text, label) or a folder of them"
SPEECH = "a folder of .wav files with a .txt transcript beside each, or transcripts.tsv (name<tab>words)"


class Fault(NamedTuple):
    """What is wrong with a line of a user's file."""

    line: int
    wanted: str
    got: str


@dataclass(frozen=True)
class Example:
    """One thing to show a model, and what is known about it."""

    text: str = ""  # the passage; of speech, its transcript
    label: str | None = None
    sound: Tensor | None = None  # (samples,), mono, between -1 and 1
    rate: int = 0
    name: str = ""


def text_of(path: Path) -> str:
    """A file's text, also of .gz and .xz: UTF-8, UTF-16 that says so, else what Windows and old data sets wrote."""
    raw = path.read_bytes()
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix)
    try:
        raw = unpack(raw) if unpack else raw
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise bad_value(f"a whole {path.suffix} file", f"{path} ({error})", "copying it again") from None
    marked = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in raw and not marked:
        raise bad_value("a text file", f"{path}, with bytes that are no text", "saving it as text, in UTF-8")
    for encoding in ("utf-16",) if marked else ("utf-8-sig", "cp1252", "latin-1"):
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError:
            continue
        return text if "\n" in text else text.replace("\r", "\n")  # old Macs end lines so
    raise bad_value("a text file", f"{path}, which begins like UTF-16 and is not", "saving it in UTF-8")


def json_objects(path: Path, faults: list[Fault] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a .jsonl file with the numbers of their lines. The first bad line is refused; given a list of
    faults, all of them are added to it instead."""
    for number, line in enumerate(text_of(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            strange = "" if isinstance(found, dict) else type(found).__name__
        except json.JSONDecodeError as error:
            strange = error.msg
        if not strange:
            yield number, found
        elif faults is None:
            raise bad_line(path, number, "one JSON object", strange)
        else:
            faults.append(Fault(number, "one JSON object", strange))


def bad_line(path: Path, number: int, wanted: str, got: str) -> ValueError:
    return bad_lines(path, [Fault(number, wanted, got)])


def bad_lines(path: Path, faults: Sequence[Fault]) -> ValueError:
    """All that is wrong with a file at once: whoever mends it need not come back for every line."""
    if len(faults) == 1:
        line, wanted, got = faults[0]
        return bad_value(f"{wanted} in {path.name}, line {line}", got, "mending that line")
    listed = [f"line {line}: wanted {wanted}, got {got}" for line, wanted, got in sorted(faults)]
    more = [f"and {len(listed) - MOST_FAULTS} more"] if len(listed) > MOST_FAULTS else []
    shown = "".join(f"\n  {each}" for each in listed[:MOST_FAULTS] + more)
    return bad_value(f"{path.name} without mistakes", f"{len(listed)} lines with some{shown}\n", "mending these lines")


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
    if file.suffix == ".jsonl":
        for number, found in json_objects(file):
            if not isinstance(found.get("text"), str):
                raise bad_line(file, number, 'an object with a "text"', ", ".join(found) or "none")
            if labelled and found.get("label") is None:
                raise bad_line(file, number, 'a "label" with every text', "none")
            label = None if found.get("label") is None else str(found["label"])
            yield Example(found["text"], label, name=f"{file.name} line {number}")
        return
    text, table = text_of(file), file.suffix == ".tsv" or labelled
    if whole and not table:
        yield from [Example(text, name=file.name)] if text.strip() else []
        return
    for number, line in enumerate(text.split("\n"), start=1):
        label, tab, rest = line.partition("\t")
        if table and line.strip() and not (tab and rest.strip()):
            raise bad_line(file, number, "label<tab>text on every line", repr(line[:40]))
        if line.strip():
            name = f"{file.name} line {number}"
            yield Example(rest.strip(), label.strip(), name=name) if table else Example(line.strip(), name=name)


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
    spoken = (
        {example.label: example.text for example in passages(table, whole=False, labelled=True)}
        if table.is_file()
        else {}
    )
    found = []
    for clip in clips:
        beside = clip.with_suffix(".txt")
        words = spoken.get(clip.name) or spoken.get(clip.stem)
        if words is None and beside.is_file():
            words = text_of(beside)
        if words is None:
            raise bad_value(SPEECH, f"{clip.name} without a transcript", f"{beside.name} or a line in {table.name}")
        found.append(_clip(clip, words))
    return found


def _listed(path: Path) -> Iterator[tuple[str, str]]:
    for number, found in json_objects(path):
        if not {"audio", "text"} <= set(found):
            raise bad_line(path, number, 'an object with "audio" and "text"', ", ".join(found) or "none")
        yield str(found["audio"]), str(found["text"])


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
