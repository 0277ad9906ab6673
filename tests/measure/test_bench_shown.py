"""What a race leaves behind: one table, a picture, the verdict on the bars, and rows that a later run goes on from."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_rows import a_row, a_run, without
from pages import script

from clusterattn._rows import Row, append
from clusterattn.measure import bench as bench_module
from clusterattn.measure import read
from clusterattn.measure.bench import PASSES
from clusterattn.measure.race import Race
from clusterattn.measure.speed_table import HEAD, as_text, cells, joined, microseconds

# ---------------------------------------------------------------- table


def test_one_line_for_both_passes() -> None:
    lines = joined(a_run())
    assert len(lines) == 3 * 4
    first = dict(zip(HEAD, cells(lines[1]), strict=True))
    assert first["method"] == "clustered:steps=2"
    assert (first["heads"], first["N"], first["batch"]) == ("6×64", "1 024", "32")
    assert (first["forward µs"], first["forward+backward µs"]) == ("180", "630")
    assert first["× floor"] == "7.5"
    assert first["error"] == "0.0123"
    assert first["memory"] == "1.25"
    assert cells(lines[1]).count("0.69") == 2  # the ratios of graphs
    assert cells(lines[1]).count("0.76") == 2  # and of eager calls


def test_a_wrong_kernel_is_in_the_table_without_a_time() -> None:
    text = as_text(a_run())
    (line,) = (line for line in text.splitlines() if line.startswith("refined") and " 32 768 " in line)
    assert "wrong" in line
    assert line.split().count("–") == 5  # eager and two ratios, memory; and forward's ratio of eager calls
    assert "dq is off by 0.3 where the reference allows 0.1; not timed" in text
    widths = {len(line) for line in text.splitlines()[:2]}
    assert len(widths) == 1


def test_what_was_not_captured_says_so() -> None:
    text = as_text([a_row("local", 1024, "forward", 1e-3, why_eager="RuntimeError: it waits")])
    assert "~1 000" in text
    assert "not captured in a graph (RuntimeError: it waits)" in text


def test_microseconds() -> None:
    assert [microseconds(x) for x in (1.234e-6, 24e-6, 180.4e-6, 0.05557)] == ["1.23", "24", "180", "55 570"]


# ---------------------------------------------------------------- picture


def test_crossings_lie_where_the_lines_meet() -> None:
    plots = pytest.importorskip("clusterattn.measure.plots_speed")
    exact = {1024: 1.0, 4096: 4.0}
    assert plots.crossing({1024: 2.0, 4096: 2.0}, exact) == (pytest.approx(2048), True)
    assert plots.crossing({1024: 1.0, 4096: 1.0}, exact) == (pytest.approx(1024), True)
    assert plots.crossing({1024: 0.5, 4096: 0.5}, exact) == (1024, False)
    assert plots.crossing({1024: 5.0, 4096: 5.0}, exact) is None
    assert plots.crossing({1024: 0.5, 4096: 5.0}, exact) is None, "ahead once is not ahead from there on"
    assert plots.crossing({512: 0.5}, exact) is None
    assert plots._between(exact, 2048) == pytest.approx(2)


def test_curves_leave_out_what_failed_and_take_the_newest() -> None:
    plots = pytest.importorskip("clusterattn.measure.plots_speed")
    rows = [*a_run(), a_row("refined", 1024, "forward", 64e-6)]
    forward, both = (plots.curves(rows, which) for which in PASSES)
    assert forward["refined"][1024] == pytest.approx(64e-6 / 32768)
    assert list(both["refined"]) == [1024, 2048, 8192]
    failed_since = {**a_row("refined", 1024, "forward", 1.0), "failed": "wrong: out"}
    assert 1024 not in plots.curves([*rows, failed_since], "forward")["refined"]


def test_the_picture_of_the_crossings() -> None:
    pytest.importorskip("matplotlib")
    from clusterattn.measure.plots_speed import crossings

    assert crossings(a_run()).startswith(b"\x89PNG")
    assert crossings([a_row("refined", 1024, "forward", 1e-3)]).startswith(b"\x89PNG")  # no peer, one pass


def test_the_crossing_in_a_sentence() -> None:
    from clusterattn.measure.plots_speed import crossing_sentences

    def rows(label: str, *seconds: float, **more: Any) -> list[Row]:
        return [a_row(label, n, "forward", each, **more) for n, each in zip((1024, 4096), seconds, strict=True)]

    exact = rows("sdpa", 1e-3, 4e-3, error=None)
    every = [*exact, *rows("refined", 2e-3, 2e-3, error=0.0321), *rows("local", 5e-3, 9e-3), *rows("smyrf", 1e-4, 1e-4)]
    assert crossing_sentences(every) == [
        "forward, beside exact attention: refined is ahead from N = 2 050 (error 0.0321 at 4 096); "
        "local does not overtake it up to 4 096; smyrf is ahead from N = 1 024 or less (error 0.0123 at 1 024)."
    ]
    assert crossing_sentences(rows("refined", 1.0, 1.0)) == []  # nothing to compare with
    auto = [a_row("auto", 1024, "forward", 9e-4, error=0.0), a_row("auto", 4096, "forward", 1e-3, error=0.0321)]
    assert crossing_sentences([*exact, auto[0]])[0].endswith("auto is exact attention up to 1 024.")
    assert "auto is ahead from N = 4 096 or less (error" in crossing_sentences([*exact, *auto])[0]


def test_the_picture_of_a_cpu_has_room_for_its_crossings() -> None:
    pytest.importorskip("matplotlib")
    from clusterattn.measure import plots, plots_speed

    drawn = [{**row, "memory_per_token": 1.0} for row in a_run()]
    assert plots_speed.scaling(drawn).startswith(b"\x89PNG")
    with plots.rules():
        axis = plots.canvas(4, 3).subplots()
        curves = {"sdpa": {1024: 1.0, 4096: 4.0}, "refined": {1024: 2.0, 4096: 2.0}}
        for label, curve in curves.items():
            plots_speed._draw(axis, label, curve, list(curves))
        axis.set(xscale="log", yscale="log")
        plots_speed._mark_crossings(axis, curves, list(curves))
        lowest = min(text.get_position()[1] for text in axis.texts)
        top = axis.transData.transform((4096, 4.0))[1]
        assert axis.transAxes.inverted().transform((0, top))[1] < lowest


def test_one_colour_for_a_method_whatever_it_is_called() -> None:
    from clusterattn.measure import plots
    from clusterattn.methods import METHODS

    assert set(METHODS) <= set(plots.STYLE)
    assert len({colour for colour, _ in plots.STYLE.values()}) == len(plots.STYLE)
    for label, name in {
        "lsh-4": "reformer",
        "full (SDPA)": "exact",
        "sdpa": "exact",
        "shared-full": "exact",
        "oracle-top": "oracle_top",
        "improved-100": "improved",
        "refined:clusters=25,top=8": "refined",
        "clusterformer-head": "clusterformer",
    }.items():
        assert plots.style_of(label) == plots.STYLE[name]
    assert plots.style_of("something else") == plots.OTHER
    shown = [plots.short(label) for label in ("lsh-4", "full", "refined:top=8")]
    assert shown == ["reformer-4", "full", "refined (8 top)"]


def test_an_axis_is_logarithmic_where_one_outlier_would_flatten_the_rest() -> None:
    from clusterattn.measure.plots_model import flattened

    assert flattened([12.0, 12.5, 13.0, 900.0])
    assert not flattened([12.0, 12.5, 13.0, 20.0])
    assert not flattened([0.0, 0.5, 90.0])  # no logarithm of nothing


def test_numbers_in_words() -> None:
    from clusterattn.measure.words import counted

    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_the_picture_of_a_pretrained_model() -> None:
    pytest.importorskip("matplotlib")
    drawn = script("pretrained_picture")
    rows = [
        {
            "method": name,
            "settings": {"method": name.split(":")[0]},
            "cost_share": share,
            "seconds": share,
            "kl": off,
            "examples": "3",
        }
        for name, share, off in (("exact", 1.0, 0.0), ("refined", 0.2, 0.01), ("smyrf:rounds=2", 0.3, 5.0))
    ]
    for timed in ({}, {"exact_seconds": 1.0}):
        png = drawn.picture("toy", [{**row, **timed} for row in rows], ["kl"])
        assert png.startswith(b"\x89PNG")


def a_model_row(method: str, settings: dict[str, Any], share: float, hidden: float, **more: Any) -> Row:
    return {
        "theme": "pretrained", "task": "minilm", "method": method, "settings": settings, "cost_share": share,
        "hidden": hidden, "distance": hidden**2 / 5, "seconds": 3.0, "limit": None, "examples": "two passages",
        "environment": {"hardware": "x", "threads": 1, "torch": "2", "commit": "c", "date": "2026-01-01"}, **more,
    }  # fmt: skip


def test_the_bars_of_a_pretrained_model_and_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan of tune counts as ours does."""
    pytest.importorskip("tqdm")
    bench = script("pretrained")
    old = {"method": "refined", "clusters": 25, "top": 32, "steps": 5, "start": "far", "block": 256}
    rows = [
        a_model_row("exact", {"method": "exact"}, 1.0, 0.0, seconds=2.0, exact_seconds=2.0),
        a_model_row("refined:clusters=25", old, 0.32, 0.25),
        a_model_row("tuned:tolerance=0.14", {"method": "tuned"}, 0.25, 0.14, exact_seconds=2.0),
    ]
    append(tmp_path / "pretrained_x.jsonl", *rows)
    words = {"rows": tmp_path / "pretrained_x.jsonl", "limit": None, "pictures": None}
    assert bench.show(type("Args", (), words)) == 1  # the other bars are missed
    shown = capsys.readouterr().out
    assert "MET   hidden-state error ≤ 0.15 at ≤ 27%: tuned:tolerance=0.14 at 25.0%" in shown
    assert "MISSED  embeddings' cosine distance" in shown
    assert any(line.split()[:2] == ["25.0%", "1.50"] for line in shown.splitlines())


def test_what_is_tuned_on_is_not_judged() -> None:
    pytest.importorskip("safetensors")
    tasks = script("pretrained_tasks")
    judged, others = tasks.spread(200, 40), tasks.between(200, 40, 8)
    assert len(set(others.tolist())) == 8
    assert not set(judged.tolist()) & set(others.tolist())
    with pytest.raises(SystemExit, match=r"wants 8 examples that are not judged: --limit 192"):
        tasks.between(200, None, 8)


# ---------------------------------------------------------------- benchmarks/gpu.py


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return script("gpu")


def test_the_plan_holds_the_bars_the_most_important_first(gpu: ModuleType) -> None:
    plan = gpu.plan()
    assert len({entry.name for entry in plan}) == len(plan)
    assert [entry.name for entry in plan[:3]] == [f"6x64 N={n} refined" for n in (32768, 8192, 131072)]
    assert [tuple(entry.bars.values()) for entry in plan[:3]] == [(11, None), (3, None), (60, None)]
    assert [tuple(entry.eager.values()) for entry in plan[:3]] == [(9, 10), (2.5, 3), (50, 55)]
    assert {"6x64 N=32768 auto", "6x64 N=32768 refined causal"} <= {entry.name for entry in plan}
    order = [entry.name.split()[0] for entry in plan if entry.bars]
    assert order == sorted(order, key=["6x64", "32x128"].index)
    bars = {entry.name: tuple(entry.bars.values()) for entry in plan if entry.bars}
    assert bars[f"6x64 N=131072 {gpu.CLUSTERED}"] == (80, 80)
    assert bars[f"32x128 N=2048 {gpu.SHORT_REFINED}"] == (1, 1)
    assert bars["6x64 N=32768 improved"] == (7, 9)
    assert bars["32x128 N=32768 smyrf"] == (8, 6)
    assert bars["6x64 N=4096 reformer:chunk=64"] == (1, None)
    assert {entry.shape[0] * entry.n for entry in plan if entry.n <= 32768} == {32768}
    million = [entry for entry in plan if entry.n == 2**20]
    assert {entry.method.name for entry in million} == {"clustered", "refined"}
    assert all(entry.passes == PASSES[1:] and not entry.peer for entry in million)


def test_the_quick_groupings_are_no_worse_than_the_papers_recipe(gpu: ModuleType) -> None:
    pytest.importorskip("safetensors")
    for method in gpu.NO_WORSE_THAN:
        ours, paper = gpu.sample_errors(method)
        assert ours <= paper, method


def test_bars_are_judged(gpu: ModuleType) -> None:
    entry = next(entry for entry in gpu.plan() if entry.name == f"6x64 N=32768 {gpu.CLUSTERED}")
    forward = a_row(str(entry.method), 32768, PASSES[0], 100e-6, speedup=34.4)
    row = gpu.judged(forward, entry, (0.5, 0.6))
    assert row["met"] is True
    assert [(bar["what"], bar["met"]) for bar in row["bars"]] == [
        ("speed", True),
        ("floor", True),
        ("sample error", True),
    ]
    slow = gpu.judged({**forward, "speedup": 19.9, "floor_ratio": 5.1, "pass": PASSES[0]}, entry, (0.7, 0.6))
    assert slow["met"] is False
    assert not any(bar["met"] for bar in slow["bars"])
    default = gpu.judged(a_row("refined", 32768, PASSES[0], 1e-4, speedup=12.0, eager_speedup=8.9), gpu.plan()[0], None)
    assert [(bar["what"], bar["met"]) for bar in default["bars"]] == [("speed", True), ("eager", False)]
    both = gpu.judged({**forward, "pass": PASSES[1], "memory_of_size": 1.6}, entry, None)
    assert [(bar["what"], bar["met"]) for bar in both["bars"]] == [("speed", True), ("memory", False)]
    failed = gpu.judged({**without(forward, "speedup", "floor_ratio"), "failed": "wrong: out"}, entry, None)
    assert failed["met"] is False
    said = gpu.verdict([row, both, failed])
    assert said[-1] == "1 bars met, 3 missed"  # the failed row stands in for the first
    assert "MISSED" in said[0]
    assert any("nothing" in line and "wrong: out" in line for line in said)


def test_what_is_there_is_not_measured_again(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "hardware", lambda device: "a GPU")
    entry = next(entry for entry in gpu.plan() if entry.name == f"6x64 N=8192 {gpu.REFINED}")
    done = a_row(str(entry.method), 8192, PASSES[0], 1e-4)
    append(tmp_path / "gpu-bars_a_2026.jsonl", done)

    def left(commit: str, since: str = "") -> list[tuple[str, ...]]:
        rows = gpu.earlier([tmp_path], "gpu-bars", "cuda", commit, since)
        return [each.passes for each in gpu.remaining([entry], rows)]

    assert left("abc") == [PASSES[1:]]
    assert left("another") == [PASSES]
    assert left("abc", since="2026-02-02") == [PASSES]
    append(tmp_path / "gpu-bars_a_2026.jsonl", {**done, "pass": PASSES[1], "failed": "wrong: out"})
    assert left("abc") == []


def test_a_rehearsal_goes_through_every_step_and_can_go_on(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--quick", "--commit", "abc", "--out", str(tmp_path)]
    assert gpu.run(gpu.arguments([*words, "--only", "N=64", "clustered"])) == 0
    (path,) = tmp_path.glob("gpu-rehearsal_*.jsonl")
    rows = read(path)
    assert len(rows) == 2 * (1 + 2)  # exact, ours and the paper's recipe, two passes
    assert {row["environment"]["commit"] for row in rows} == {"abc"}
    assert not any(row.get("bars") or row.get("failed") for row in rows)
    shown = capsys.readouterr().out
    assert "2 entries, 2 to measure" in shown
    assert "0 bars met, 0 missed" in shown
    assert gpu.run(gpu.arguments([*words, "--only", "N=64", "clustered"])) == 0
    assert read(path) == rows
    assert "2 entries, 0 to measure" in capsys.readouterr().out
    assert gpu.run(gpu.arguments([*words, "--only", "N=2048", "clustered"])) == 0  # the million tokens, in small
    assert "speedup" not in read(path)[-1]
    gpu.run(gpu.arguments([*words, "--seconds", "-1", "--only", "N=32"]))
    assert "seconds are over" in capsys.readouterr().out


def test_the_device_of_a_lost_context_is_taken_up_by_a_new_process(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(Exception):
        pass

    def gone(program: str, words: list[str]) -> None:
        raise Gone(words)

    monkeypatch.setattr(gpu.os, "execv", gone)
    monkeypatch.setattr(Race, "alive", lambda self: False)
    words = ["--device", "cpu", "--quick", "--commit", "abc", "--out", str(tmp_path), "--only", "N=64", "--again"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    with pytest.raises(Gone) as left:
        gpu.main()
    (asked,) = left.value.args
    assert "--again" not in asked
    again = gpu.arguments(asked[2:])
    rows = gpu.earlier([tmp_path], "gpu-rehearsal", "cpu", "abc", again.since)
    assert len(rows) == 4, "what the lost process measured counts as done"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu", "--commit", "abc"], "wanted a GPU"),
        (["--quick", "--device", "cpu"], "try --commit ID"),
    ],
)
def test_bad_words_are_refused(
    words: list[str], said: str, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "commit", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        gpu.arguments(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- the README and the command


def test_the_readme_shows_the_rows_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    tables = script("readme_tables")
    monkeypatch.setattr(tables.words, "RESULTS", tmp_path)
    rehearsal = [{**row, "theme": "gpu-rehearsal"} for row in a_run()]
    append(tmp_path / "gpu-rehearsal.jsonl", *rehearsal)
    assert tables.gpu_table() == tables.gpu_figures() == tables.NOT_YET
    for method, commit, date in (("local", "oldest", "2025-01-01"), ("routing", "old", "2025-01-02")):
        older = a_row(method, 1024, "forward", 1.0, speedup=0.1)
        older["environment"] = {**older["environment"], "commit": commit, "date": date}
        append(tmp_path / "gpu-bars.jsonl", older)
    append(tmp_path / "gpu-bars.jsonl", *a_run())
    shown = tables.gpu_table()
    assert "0.69×† / 0.69×†" in shown
    assert "**19.11×** / **19.11×**" in shown
    assert "**9.56×** / wrong" in shown
    assert "(img/crossings.png)" in shown
    assert "`routing`" in shown  # what the newest commit did not reach, as it was before
    assert "local" not in shown
    assert shown.count("| 0.0123 |") == 3  # the error of each method beside its speeds
    figures = tables.gpu_figures()
    assert figures.count("\n| `") == 13
    assert "- refined, 6×64, N = 32 768, forward+backward: wrong: dq is off by 0.3" in figures
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    (tmp_path / "img").mkdir()
    tables.draw()
    assert (tmp_path / "img" / "crossings.png").stat().st_size < 150_000


def test_causal_speeds_have_tables_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script("readme_tables")
    monkeypatch.setattr(tables.words, "RESULTS", tmp_path)
    plain = a_row("refined", 8192, "forward", 1e-3, speedup=3.0)
    append(tmp_path / "gpu-bars.jsonl", plain)
    assert tables.TABLES["gpu-causal"]() == tables.NOT_YET
    append(tmp_path / "gpu-bars.jsonl", {**plain, "causal": True, "speedup": 1.5, "error": 0.0456})
    append(tmp_path / "bench.jsonl", {**plain, "theme": "bench", "device": "cpu", "causal": True, "speedup": 0.8})
    assert "3.00×" in tables.TABLES["gpu"]()
    assert "1.50×" not in tables.TABLES["gpu"]()
    assert "| **1.50×** | 0.0456 |" in tables.TABLES["gpu-causal"]()
    assert "| 0.80× | 0.0123 |" in tables.TABLES["cpu-causal"]()
    assert tables.TABLES["cpu"]() == tables.NOT_YET
    assert re.search(r"a mixture of Gaussians, \d+ × \d+, causal", tables.TABLES["box"]())


def test_host_times_come_from_the_newest_rows_that_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script("readme_tables")
    monkeypatch.setattr(tables.words, "RESULTS", tmp_path)
    row = a_row("refined", 8192, "forward", 5e-4, speedup=1.7)
    append(tmp_path / "gpu-bars.jsonl", row)
    assert tables.TABLES["host"]() == tables.NOT_YET
    both = [{**row, "host_seconds": 1e-4}, a_row("refined", 8192, "forward+backward", 1e-3, host_seconds=8e-4)]
    append(tmp_path / "gpu-bars.jsonl", *both, {**both[0], "causal": True}, {**both[0], "n": 1024})
    shown = tables.TABLES["host"]()
    assert "| `refined` | 8 192 | 0.10 | 0.55 | 0.80 | 1.05 |" in shown
    assert shown.count("\n| `") == 1


def test_the_command_prints_one_table_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    from typer.testing import CliRunner

    from clusterattn import _rows as files
    from clusterattn import cli

    asked: dict[str, Any] = {}

    def fake(methods: Any, **options: Any) -> list[Row]:
        asked.update(options)
        return a_run()

    monkeypatch.setattr(bench_module, "bench", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(files, "hardware", lambda device="cpu": "a GPU")
    shown = CliRunner().invoke(cli.build(), ["bench", "--device", "cuda", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert asked["batch"] is None
    assert asked["dtype"] == torch.bfloat16
    assert shown.stdout.startswith(as_text(a_run()))
    (rows,) = tmp_path.glob("bench_a-gpu_*.jsonl")
    assert rows.with_suffix(".png").exists()
