"""Speech: formats, features, CTC, error rates, the model."""

from __future__ import annotations

import itertools
import math
import struct
import wave
from pathlib import Path

import pytest
import torch
from torch import nn

from clusterattn.measure.reading import read_wav
from clusterattn.measure.tasks import edits
from clusterattn_papers.models import Answer, attending_with, attentions
from clusterattn_papers.models.speech import SpeechEncoder, hide
from clusterattn_papers.reproduce._speech import invented
from clusterattn_papers.tasks import batches, speech
from clusterattn_papers.tasks.speech import Recording, Speech, Spelled

WORDS = {"ONE": "W AH N", "A": "AH", "A(2)": "EY", "B": "B IY"}


@pytest.fixture
def an4(tmp_path: Path) -> Path:
    """A corpus in AN4's form: 10 training speakers with two utterances each, one test speaker."""
    etc = tmp_path / "an4" / "etc"
    etc.mkdir(parents=True)
    (etc / "an4.dic").write_text("".join(f"{word:<20} {phones}\n" for word, phones in WORDS.items()))
    dice = torch.Generator().manual_seed(0)
    for part, folder, speakers in (("train", "an4_clstk", range(10)), ("test", "an4test_clstk", [99])):
        names = [f"{folder}/s{who:02}/u{turn}-s{who:02}-b" for who in speakers for turn in (1, 2)]
        (etc / f"an4_{part}.fileids").write_text("\n".join(names) + "\n")
        lines = [f"ONE A B ({name.split('/')[-1]})" for name in names]
        (etc / f"an4_{part}.transcription").write_text("\n".join(lines) + "\n")
        for at, name in enumerate(names):
            path = tmp_path / "an4" / "feat" / f"{name}.mfc"
            path.parent.mkdir(parents=True, exist_ok=True)
            values = torch.randn((20 + at) * 13, generator=dice).tolist()
            path.write_bytes(struct.pack(f">i{len(values)}f", len(values), *values))
    return tmp_path


def write_wav(
    path: Path, pitch: float, seconds: float = 0.4, rate: int = 8000, width: int = 2, channels: int = 1
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    tone = [math.sin(2 * math.pi * pitch * at / rate) for at in range(int(seconds * rate))]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels), file.setsampwidth(width), file.setframerate(rate)
        sound = [struct.pack("<h", int(9000 * each)) if width == 2 else bytes([128]) for each in tone]
        file.writeframes(b"".join(each * channels for each in sound))
    return path


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    for at in range(12):
        said = write_wav(tmp_path / f"{at:02}.wav", 500 + 200 * (at % 2)).with_suffix(".txt")
        said.write_text(" hi\n" if at % 2 else "lo ho")
    return tmp_path


# ---------------------------------------------------------------------------------------------------- AN4


def test_an4_is_read(an4: Path) -> None:
    task = Speech.an4(an4, frames=0)
    assert {split: len(each) for split, each in task.splits.items()} == {"train": 18, "dev": 2, "test": 2}
    assert task.symbols == ["AH", "B", "EY", "IY", "N", "W"]
    first = task.splits["train"][0]
    assert first.frames.shape == (20, 39)
    spelled = [task.symbols[at] for at in first.symbols.tolist()]
    assert spelled == ["W", "AH", "N", "EY", "B", "IY"]  # A is a letter here, though the article comes first


def test_an4_frames_are_what_the_file_holds(an4: Path) -> None:
    values = [float(at) for at in range(26)]
    path = an4 / "two.mfc"
    path.write_bytes(struct.pack(">i26f", 26, *values))
    assert speech.an4_cepstra(path).flatten().tolist() == values
    path.write_bytes(struct.pack("<i26f", 26, *values))
    with pytest.raises(ValueError, match=r"wanted a big-endian count.*got.*try"):
        speech.an4_cepstra(path)


def test_an4_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"wanted CMU AN4.*try"):
        Speech.an4(tmp_path)


def test_dev_speakers_are_not_trained_with(an4: Path) -> None:
    whole = [len(each.frames) for split in ("train", "dev") for each in Speech.an4(an4, frames=0).splits[split]]
    assert sorted(whole) == list(range(20, 40))  # every utterance once


def test_joining_plays_every_recording_once_each_time(an4: Path) -> None:
    alone, task = Speech.an4(an4, frames=0), Speech.an4(an4, frames=90, joinings=3)
    every, groups = sum(len(each.frames) for each in alone.splits["train"]), task.splits["train"]
    assert sum(len(each.frames) for each in groups) == 3 * every
    assert 60 < 3 * every / len(groups) < 120
    first, parts = groups[0], [alone.splits["train"][at] for at in groups.groups[0]]  # type: ignore[attr-defined]
    assert torch.equal(first.frames, torch.cat([part.frames for part in parts]))
    assert torch.equal(first.symbols, torch.cat([part.symbols for part in parts]))
    again, other = Speech.an4(an4, frames=90, joinings=3), Speech.an4(an4, frames=90, joinings=3, seed=1)
    assert groups.groups == again.splits["train"].groups != other.splits["train"].groups  # type: ignore[attr-defined]
    assert task.splits["dev"].groups == other.splits["dev"].groups  # type: ignore[attr-defined]


def test_changes_are_slopes() -> None:
    ramp = torch.arange(10.0).unsqueeze(1) * torch.tensor([1.0, -2.0])
    slope = speech.changes(ramp)
    assert torch.allclose(slope[2:-2], torch.tensor([1.0, -2.0]).expand(6, 2))
    assert slope[0].tolist() == pytest.approx([0.5, -1.0])  # (-2·0 - 1·0 + 1·1 + 2·2) / 10, the end held


def test_normalised() -> None:
    frames = speech.normalised(torch.randn(50, 3) * 7 + 5)
    assert torch.allclose(frames.mean(0), torch.zeros(3), atol=1e-5)
    assert torch.allclose(frames.std(0, unbiased=False), torch.ones(3), atol=1e-4)
    assert speech.normalised(torch.ones(4, 2)).abs().max() == 0  # silence is no reason for NaN


# ---------------------------------------------------------------------------------------------------- .wav files


def test_a_tone_is_loudest_in_its_band(tmp_path: Path) -> None:
    sound, rate = read_wav(write_wav(tmp_path / "tone.wav", 1000.0, channels=2))
    assert rate == 8000
    assert len(sound) == 3200
    assert 0.25 < sound.abs().max() < 0.3
    power = torch.stft(sound, 256, 80, 200, torch.hann_window(200), return_complex=True).abs().square()
    loudest = int((speech.mel(8000, 256) @ power).mean(1).argmax())
    mels = [2595 * math.log10(1 + hertz / 700) for hertz in (1000, 4000)]
    assert abs(loudest + 1 - 41 * mels[0] / mels[1]) < 1
    assert speech.loudness(tmp_path / "tone.wav", 8000).shape == (41, speech.BANDS)


def test_complaints_about_recordings(tmp_path: Path, recordings: Path) -> None:
    assert read_wav(write_wav(tmp_path / "old" / "eight.wav", 100.0, width=1))[0].abs().max() == 0
    with pytest.raises(ValueError, match=r"one rate \(8000 Hz\).*got 16000"):
        speech.loudness(write_wav(tmp_path / "old" / "fast.wav", 100.0, rate=16000), 8000)
    with pytest.raises(ValueError, match=r"pairs.*got 2 \.wav, 0 of them"):
        Speech.read(tmp_path / "old")
    for content in (b"", b"no sound at all", write_wav(tmp_path / "old" / "mute.wav", 100.0, seconds=0).read_bytes()):
        (tmp_path / "junk.wav").write_bytes(content)
        with pytest.raises(ValueError, match=r"wanted a .*\.wav.*; got .*junk\.wav.*; try"):
            speech.loudness(tmp_path / "junk.wav", 8000)
    (recordings / "words.dic").write_text("hi HH AY\n")
    with pytest.raises(ValueError, match=r"every word in words\.dic.*ho"):
        Speech.read(recordings)


def test_own_recordings_letters_and_back(tmp_path: Path, recordings: Path) -> None:
    task = Speech.read(recordings)
    assert isinstance(task, Spelled)
    assert task.figure == "character error rate"
    assert task.symbols == [" ", "h", "i", "l", "o"]
    assert {split: len(each) for split, each in task.splits.items()} == {"train": 10, "dev": 2}
    model = task.model("exact", dim=8, heads=2, layers=1, feedforward=8)
    with torch.no_grad():
        model.leave.bias.copy_(torch.tensor([0.0, 99.0, 0.0, 0.0, 0.0, 0.0]))  # it always says h
    task.save(tmp_path / "new" / "model")
    back = Speech.restore(tmp_path / "new" / "model")
    assert isinstance(back, Spelled)
    assert back.symbols == task.symbols
    assert back.predict(model, [recordings / "00.wav", task.splits["dev"][0].frames]) == ["h", "h"]


def test_own_recordings_phones_parts_and_length(recordings: Path) -> None:
    (recordings / "words.dic").write_text("hi HH AY\nlo L OW\nho HH OW\n")
    write_wav(recordings / "long.wav", 300.0, seconds=1.0).with_suffix(".txt").write_text("hi")
    with pytest.warns(UserWarning, match="1 of 13 recordings have more than 60 frames"):
        task = Speech.read(recordings, length=60)
    assert type(task) is Speech
    assert task.symbols == ["AY", "HH", "L", "OW"]
    for part, at in (("train", 0), ("dev", 1), ("test", 2)):
        write_wav(recordings / "parts" / part / f"{at}.wav", 300.0).with_suffix(".txt").write_text("hi")
    parts = Speech.read(recordings / "parts")
    assert {split: len(each) for split, each in parts.splits.items()} == {"train": 1, "dev": 1, "test": 1}


# ---------------------------------------------------------------------------------------------------- CTC and figures


def test_edits() -> None:
    cases = [([1, 2, 3], [1, 2, 3], 0), ([1, 2, 3], [], 3), ([], [4], 1), ([1, 2, 3, 4], [2, 3, 5, 4], 2)]
    assert all(edits(wanted, got) == far for wanted, got, far in cases)


def odds(path: list[int], classes: int = 4) -> torch.Tensor:
    return 5 * nn.functional.one_hot(torch.tensor(path), classes).float()


def test_best_path_collapses_and_padding_is_silent() -> None:
    logits = torch.stack([odds([0, 0, 3, 0, 1, 1]), odds([3, 2, 2, 1, 1, 0])])
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    assert speech.best_paths(logits, mask) == [[0, 0, 1], [2]]


class Says(nn.Module):
    """Answers what it was given."""

    def __init__(self, auxiliary: float = 0.0) -> None:
        super().__init__()
        self.auxiliary = auxiliary

    def forward(self, frames: torch.Tensor, mask: torch.Tensor) -> Answer:
        return Answer(frames, torch.tensor(self.auxiliary))


def test_error_rate_by_hand() -> None:
    said = [Recording(odds([0, 3, 1]), torch.tensor([0, 1])), Recording(odds([2, 2, 3, 3]), torch.tensor([2, 1, 0]))]
    task = Speech({"dev": said}, ["AA", "IY", "UW"], features=4)
    figures = task.judge(Says(), batches(task, "dev", 2))
    assert figures["phone error rate"] == pytest.approx(2 / 5)  # two of three are missing in the second


def test_a_methods_own_loss_is_trained_with_and_not_judged() -> None:
    said = [Recording(torch.randn(5, 4), torch.tensor([0, 1]))]
    task = Speech({"dev": said}, ["AA", "IY", "UW"], features=4)
    total, count = task.loss(Says(), task.collate(said))
    more, _ = task.loss(Says(0.5), task.collate(said))
    assert float(more - total) == pytest.approx(0.5 * 2)
    for model in (Says(), Says(0.5)):
        assert task.judge(model, batches(task, "dev", 1))["nll"] == pytest.approx(float(total / count))


def test_loss_is_all_paths_and_padding_adds_nothing() -> None:
    torch.manual_seed(0)
    task = Speech({}, ["AA", "IY", "UW"], features=4)
    examples = [Recording(torch.randn(3, 4), torch.tensor([0, 2])), Recording(torch.randn(5, 4), torch.tensor([1]))]
    total, count = task.loss(Says(), task.collate(examples))
    expected = 0.0
    for frames, wanted in examples:
        odds_of, likely = frames.log_softmax(-1), []
        for path in itertools.product(range(4), repeat=len(frames)):
            heard = [at for at, _ in itertools.groupby(path) if at != 3]
            if heard == wanted.tolist():
                likely.append(sum(odds_of[n, at] for n, at in enumerate(path)))
        expected -= float(torch.logsumexp(torch.stack(likely), 0))  # type: ignore[arg-type]
    assert count == 3
    assert float(total) == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("method", ["exact", "clustered:clusters=4", "refined:clusters=4,top=4", "reformer:chunk=8"])
def test_padding_changes_nothing(method: str) -> None:
    torch.manual_seed(0)
    model = SpeechEncoder(method, 5, 3, dim=16, heads=2, layers=2, feedforward=16, reach=2).eval()
    frames = torch.randn(2, 24, 5)
    mask = torch.arange(24) < torch.tensor([[24], [15]])
    with torch.no_grad():
        before = model(frames, mask).logits
        after = model(frames.masked_fill(~mask.unsqueeze(-1), 1e3), mask).logits
        assert before.shape == (2, 24, 4)
        assert torch.equal(before[mask], after[mask])
        if method == "exact":
            assert torch.allclose(model(frames[1:, :15], mask[1:, :15]).logits[0], before[1, :15], atol=1e-5)


def test_shared_queries_and_keys() -> None:
    shared = SpeechEncoder("exact", 5, 3, dim=16, heads=2, layers=1, shared_qk=True).eval()
    own = SpeechEncoder("exact", 5, 3, dim=16, heads=2, layers=1).eval()
    assert all(each.k_proj is None for each in attentions(shared))
    frames, mask = torch.randn(1, 40, 5), torch.ones(1, 40, dtype=torch.bool)
    with torch.no_grad(), attending_with(shared, "reformer:rounds=1,chunk=8"):
        assert shared(frames, mask).logits.isfinite().all()
    with pytest.raises(ValueError, match="shared"), attending_with(own, "reformer"):
        pass


def test_hiding_is_for_training() -> None:
    torch.manual_seed(0)
    gone = (hide(torch.ones(64, 200, 10), 0.1) == 0).float()
    assert 0.1 < gone.mean() < 0.3
    model = SpeechEncoder("exact", 5, 3, dim=16, heads=2, layers=1, dropout=0.0, hidden=0.5)
    frames, mask = torch.randn(1, 40, 5), torch.ones(1, 40, dtype=torch.bool)
    with torch.no_grad():
        assert not torch.equal(model(frames, mask).logits, model(frames, mask).logits)
        model.eval()
        assert torch.equal(model(frames, mask).logits, model(frames, mask).logits)


def test_it_learns() -> None:
    torch.manual_seed(0)
    task = invented(24, 10)
    model = task.model("exact", dim=32, heads=2, layers=1, feedforward=32, dropout=0.0, reach=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(12):
        for batch in batches(task, "train", 16, seed=epoch):
            total, count = task.loss(model, batch)
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
    with torch.no_grad():
        assert task.judge(model.eval(), batches(task, "dev", 8))["phone error rate"] < 0.3
