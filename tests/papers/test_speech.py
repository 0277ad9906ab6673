"""Speech: formats, features, CTC, error rates, and the speech experiments at their smallest."""

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
from clusterattn_papers.reproduce import Context, _speech
from clusterattn_papers.reproduce import clustered_speech as speech_tables
from clusterattn_papers.reproduce import clustered_speech_figures as speech_figures
from clusterattn_papers.reproduce._speech import FINE_TUNED, PAPER, SHOWN, SMALL, invented, thinned
from clusterattn_papers.tasks import batches, speech
from clusterattn_papers.tasks.speech import Recording, Speech, Spelled
from clusterattn_papers.train import checkpoint

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


# ---------------------------------------------------------------------------------------------------- the experiments


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    pytest.importorskip("accelerate")
    found = {}
    for made in (speech_tables.ClusteredTable1(), speech_tables.ClusteredTable3()):
        config = made.scales["smoke"]
        found[made.name] = [
            {**cell.settings, **row}
            for cell in made.cells(config)
            for row in made.run(cell, config, Context(torch.device("cpu"), None, tmp_path_factory.mktemp("work")))
        ]
    return found


@pytest.mark.parametrize("kind", [*speech_tables.EXPERIMENTS, *speech_figures.EXPERIMENTS], ids=lambda kind: kind.name)
def test_smoke(kind: type, rows: dict[str, list[dict[str, object]]]) -> None:
    shown = kind()
    config, mine = shown.scales["smoke"], rows[shown.rows_from or shown.name]
    tables = shown.tables(mine, config)
    assert tables
    assert all(len(line) == len(table.columns) for table in tables for line in table.rows)
    assert not any("…" in cell for table in tables for line in table.rows for cell in line)
    assert shown.tables([], config)
    assert all(map(str, shown.differences(config)))
    assert all(shown.differences(each) for each in shown.scales.values())
    assert shown.findings(mine, config)
    assert shown.findings([], config) == []
    picture = shown.picture(mine, config)
    assert (picture or b"").startswith(b"\x89PNG") == (kind in (speech_figures.Figure1, speech_figures.Figure7))


def test_more_clusters_are_tuned_from_fewer_where_the_paper_does_so(rows: dict[str, list[dict[str, object]]]) -> None:
    tuned = {
        (row["trained"], row["layers"]): row["tuned_from"] for row in rows["clustered-table1"] if "tuned_from" in row
    }
    assert tuned == {("improved-200", 2): "improved-100"}
    rule = FINE_TUNED[PAPER]
    assert (rule.epochs, rule.lr) == (15, 1e-5)
    assert {name: rule.start(name) for name, _ in PAPER.also} == {
        "full": None,
        "improved-100": None,
        "improved-200": "improved-100",
        "clustered-200": "clustered-100",
        "clustered-300": "clustered-100",
    }
    assert SMALL not in FINE_TUNED
    figure = speech_figures.Figure1()
    assert "from scratch" in figure.differences(SMALL)[-1]
    assert "15 epochs at 1e-05; published: 15 epochs" in figure.differences(PAPER)[-1]


def test_tuning_starts_from_the_weights_that_were_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = speech_tables.ClusteredTable1()
    config = table.scales["smoke"]
    cells = {cell.name: cell for cell in table.cells(config)}
    started: list[dict[str, torch.Tensor]] = []
    fit = _speech.fit

    def noted(task, model, settings, **options):  # type: ignore[no-untyped-def]
        started.append({name: each.clone() for name, each in model.state_dict().items()})
        return fit(task, model, settings, **options)

    monkeypatch.setattr(_speech, "fit", noted)
    for at, name in enumerate(("improved-100, 2 layers, seed 0", "improved-200, 2 layers, seed 0")):
        table.run(cells[name], config, Context(torch.device("cpu"), None, tmp_path / str(at)))
    kept = checkpoint.weights(tmp_path / "improved-100-2-0.safetensors")
    assert len(started) == 2  # the first model was not trained again
    assert kept.keys() == started[1].keys()
    assert all(each.equal(started[1][name]) for name, each in kept.items())
    assert any(not each.equal(started[0][name]) for name, each in kept.items())
    elsewhere = tmp_path / "elsewhere" / "cell"
    table.run(cells["improved-200, 2 layers, seed 0"], config, Context(torch.device("cpu"), None, elsewhere))
    assert len(started) == 4  # nothing was left there: first the one, then the other
    assert all(each.equal(started[3][name]) for name, each in kept.items())


def test_table1_has_the_papers_cells(rows: dict[str, list[dict[str, object]]]) -> None:
    mine = rows["clustered-table1"]
    mine = [row for row in mine if "evaluated" in row]
    cells = {(row["evaluated"], row["trained"]) for row in mine if row["layers"] == 1}
    published = set(speech_tables.TABLE1)
    ours = {cell for cell in cells if not any(str(name).startswith("refined") for name in cell)}
    assert ours == published
    assert len(published) == 42
    whole = [row["kl"] for row in mine if row["evaluated"] in ("full", "shared-full")]
    assert whole
    assert all(abs(float(str(each))) < 1e-6 for each in whole)


def test_findings_read_the_papers_own_table() -> None:
    table, config = speech_tables.ClusteredTable1(), SMALL
    copied = [
        {"evaluated": one, "trained": two, "layers": config.layers, "seed": 0, "dev": value / 100, "kl": value}
        for (one, two), value in speech_tables.TABLE1.items()
    ]
    lines = table.findings(copied, config)
    text = "ahead in 5 of 6 columns (behind when trained with clustered-100)"
    assert (
        lines[0] == f"improved-100 against clustered-100: by distance from full attention {text}; by error rate "
        f"{text}; in the paper, by error rate, {text}."
    )
    assert any(
        "improved-100 against oracle-top: by distance from full attention ahead in 6 of 6 columns;" in line
        for line in lines
    )


def test_table1_says_which_columns_the_seeds_do_not_decide() -> None:
    def column(trained: str, *more: float) -> list[dict[str, object]]:
        """Errors of improved-100 less those of clustered-100, seed by seed."""
        return [
            {**model_row(name, seed, 0.3 + each * (name == "improved-100")), "trained": trained}
            for seed, each in enumerate(more)
            for name in ("improved-100", "clustered-100")
        ]

    rows = column("full", -0.03, -0.02, -0.03) + column("lsh-1", 0.03, 0.02, 0.03) + column("lsh-4", 0.1, -0.1, 0.05)
    (line,) = speech_tables.ClusteredTable1().findings(rows, SMALL)
    told = "ahead in 1 of 3 columns (behind when trained with lsh-1; not told apart when trained with lsh-4)"
    assert f"by error rate {told}" in line
    assert "by distance from full attention ahead in 0 of 3 columns (not told apart when trained with full," in line


def pace_row(name: str, seconds: float) -> dict[str, object]:
    return {"trained": name, "layers": SMALL.layers, "pace": True, "pass": "answering", "seconds": seconds}


def model_row(name: str, seed: int, test: float, loss: float = 1.0) -> dict[str, object]:
    history = [[1, 0.5, 3.0, 3.0, 1.0], [2, 1.0, loss, 2.0, 0.5]]
    return {
        "evaluated": name,
        "trained": name,
        "layers": SMALL.layers,
        "seed": seed,
        "dev": test,
        "kl": 0.1,
        "test": test,
        "history": history,
    }


def test_methods_without_a_common_column_are_not_compared() -> None:
    rows = [model_row("improved-100", 0, 0.2), model_row("lsh-1", 0, 0.3)]
    assert speech_tables.ClusteredTable1().findings(rows, SMALL) == []


def test_findings_go_seed_by_seed() -> None:
    rows = [model_row("full", seed, 0.2 + seed / 10) for seed in range(3)]
    rows += [model_row("improved-100", seed, 0.19 + seed / 10, loss=1.5) for seed in range(3)]
    rows += [model_row("clustered-100", 0, 0.25, loss=1.25)]
    said = speech_tables.ClusteredTable2().findings(rows, SMALL)
    assert (
        said[0] == "improved-100 against full, points of error rate on test: -1.00 ± 0.00 (ahead, the paper's "
        "+0.58, the other way round)."
    )
    assert "clustered-100, points of error rate on test: -6.00 (one run, the paper's -1.89)" in said[1]
    assert len(said) == 2  # nothing is said of speed that was not measured
    paces = [{**pace_row("full", 0.02), "pass": "training"}, {**pace_row("improved-100", 0.01), "pass": "training"}]
    said = speech_tables.ClusteredTable2().findings(rows + paces, SMALL)
    assert "improved-100 is 2.00 times as fast as with full" in said[-1]
    said = speech_figures.Figure7().findings(rows, SMALL)
    assert "least first: full 1.000, clustered-100 1.250, improved-100 1.500" in said[0]
    assert "improved-100 against clustered-100, nats at the end: +0.250 (one run)" in said[1]
    assert speech_figures.Figure1().findings(rows, SMALL) == []
    rows += [pace_row(name, 1.0 + (name == "improved-100")) for name in ("full", "improved-100", "clustered-100")]
    said = speech_figures.Figure1().findings(rows, SMALL)
    assert said == ["Both faster and better than improved-100 with 4 layers, of 2 others: none, as in the paper."]
    rows += [model_row("clustered-100", 1, 0.28), model_row("clustered-100", 2, 0.41), pace_row("lsh-4", 1.0)]
    rows += [model_row("lsh-4", seed, 0.15 + seed / 10) for seed in range(3)]
    said = speech_figures.Figure1().findings(rows, SMALL)
    assert said[0].endswith(
        "of 3 others: lsh-4 with 4 layers, unlike in the paper; faster and not told apart: clustered-100 with 4 layers."
    )


def test_each_table_names_the_data_it_stands_for() -> None:
    said = " ".join(speech_tables.ClusteredTable3().differences(speech_tables.ClusteredTable3.scales["small"]))
    assert "Wall Street" not in said
    assert "80 filter-banks" in said
    assert "1500 frames on average, longer than the published 534 (at most 3850)" in said
    assert "published: 12 layers, lr 0.0002" in said
    said = " ".join(speech_tables.ClusteredTable1().differences(SMALL))
    assert "Switchboard" not in said
    assert "780 frames on average, as published" in said


@pytest.mark.parametrize("length", [0, 1, 59, 60, 61, 119, 120, 121, 1000])
def test_a_thinned_history_ends_where_the_whole_one_does(length: int) -> None:
    kept = [line["step"] for line in thinned([{"step": at} for at in range(length)])]
    assert len(kept) <= SHOWN
    assert kept[-1:] == list(range(length))[-1:]
