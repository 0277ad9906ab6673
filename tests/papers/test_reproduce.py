"""The runner: what is done stays done, what fails loses nothing else, several processes give the same rows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from clusterattn._rows import read
from clusterattn.cli import build
from clusterattn_papers import reproduce
from clusterattn_papers.reproduce import Cell, Experiment, Table, beside, chosen, page, runner, spread
from clusterattn_papers.reproduce._experiment import pinned
from clusterattn_papers.reproduce.report import write_page

RAN: list[str] = []


@dataclass(frozen=True)
class Config:
    numbers: tuple[int, ...] = (1, 2, 3)
    bad: int | None = None
    seeds: int = 1


class Squares(Experiment):
    name, place, about = "clustered-squares", "Table 99", "squares of numbers"
    scales = {"smoke": Config(), "small": Config(numbers=(4,)), "paper": Config()}  # noqa: RUF012

    def cells(self, config):
        return [Cell(f"number {number}", {"number": number}, seconds=number) for number in config.numbers]

    def run(self, cell, config, context):
        RAN.append(cell.name)
        assert context.device == torch.device("cpu")
        if cell.settings["number"] == config.bad:
            raise RuntimeError("no square here")
        return [{"square": cell.settings["number"] ** 2}]

    def tables(self, rows, config):
        cells = [[str(number), beside(1.0, chosen(rows, "square", number=number))] for number in config.numbers]
        return [Table("squares", ["number", "square"], cells, ["a note"])]

    def differences(self, config):
        return ["Nothing."]

    def findings(self, rows, config):
        return [f"{len(rows)} rows."]


class Shown(Squares):
    name, place, rows_from = "clustered-shown", "Figure 99", "clustered-squares"


class Slower(Squares):
    name, place = "clustered-slower", "Figure 98"
    scales = {"smoke": Config(numbers=(8, 7)), "small": Config(), "paper": Config()}  # noqa: RUF012


@pytest.fixture(autouse=True)
def _only_toys(monkeypatch):
    module = ModuleType("clusterattn_papers.reproduce.toys")
    module.EXPERIMENTS = [Squares, Shown, Slower]
    monkeypatch.setitem(sys.modules, "clusterattn_papers.reproduce.toys", module)
    monkeypatch.setattr(reproduce, "MODULES", ("toys",))
    RAN.clear()


def test_what_is_done_stays_done(tmp_path):
    first = runner.reproduce(["clustered-squares"], only="1|2", out=tmp_path)
    assert [row["square"] for row in first.rows["clustered-squares"]] == [1, 4]  # the shortest cell first
    second = runner.reproduce(["clustered-squares"], out=tmp_path)
    assert sorted(row["square"] for row in second.rows["clustered-squares"]) == [1, 4, 9]
    assert sorted(RAN) == ["number 1", "number 2", "number 3"]
    (path,) = tmp_path.glob("*.jsonl")
    assert path.name.startswith("reproduce-clustered-squares_")
    row = read(path)[0]
    assert {"theme", "experiment", "scale", "config", "cell", "number", "square", "environment"} <= row.keys()


def test_experiments_run_in_the_order_of_their_names_and_short_cells_first(tmp_path):
    runner.reproduce(["clustered-slower", "clustered-squares"], out=tmp_path)
    assert [f"number {number}" for number in (7, 8, 1, 2, 3)] == RAN


class Timed(Squares):
    name, place = "clustered-timed", "Figure 97"

    def cells(self, config):
        return [replace(cell, alone=cell.settings["number"] > 1) for cell in super().cells(config)]


def test_time_is_measured_again_at_another_commit_and_the_latest_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["clusterattn_papers.reproduce.toys"], "EXPERIMENTS", [Timed])
    dates = iter(("2026-01-02T00:00:00+00:00", "2026-01-03T00:00:00+00:00", "2026-01-04T00:00:00+00:00"))
    around = runner.files.environment("cpu")
    monkeypatch.setattr(runner.files, "environment", lambda device: {**around, "date": next(dates)})
    runner.reproduce(["clustered-timed"], out=tmp_path, commit="one")
    runner.reproduce(["clustered-timed"], out=tmp_path, commit="two")
    assert len(RAN) == 3  # all are there
    outcome = runner.reproduce(["clustered-timed"], out=tmp_path, commit="two", again=True, only="[123]")
    assert RAN[3:] == ["number 2", "number 3"]
    of = {row["number"]: row["environment"]["commit"] for row in outcome.rows["clustered-timed"]}
    assert of == {1: "one", 2: "two", 3: "two"}
    assert len(outcome.rows["clustered-timed"]) == 3


def test_rows_of_another_configuration_are_not_mixed_in(tmp_path, monkeypatch):
    runner.reproduce(["clustered-squares"], out=tmp_path)
    monkeypatch.setitem(Squares.scales, "smoke", Config(numbers=(1, 2, 3, 5)))
    assert len(runner.reproduce(["clustered-squares"], out=tmp_path).rows["clustered-squares"]) == 4
    assert len(RAN) == 7
    monkeypatch.setitem(Squares.scales, "smoke", Config(numbers=(1, 2, 3, 5), seeds=3))  # is no other one
    assert len(runner.reproduce(["clustered-squares"], out=tmp_path).rows["clustered-squares"]) == 4


def test_a_cell_that_fails_loses_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setitem(Squares.scales, "smoke", replace(Config(), bad=2))
    outcome = runner.reproduce(["clustered-squares"], out=tmp_path)
    assert sorted(row["square"] for row in outcome.rows["clustered-squares"]) == [1, 9]
    assert list(outcome.failed) == ["clustered-squares: number 2"]
    assert "no square here" in outcome.failed["clustered-squares: number 2"]


def run_with_processes(tmp_path, code):
    """In a program of its own: the processes must be able to import the experiment."""
    (tmp_path / "toys.py").write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_reproduce import Config, Squares, reproduce, runner\n"
        "sys.modules['clusterattn_papers.reproduce.toys'] = sys.modules[__name__]\n"
        "reproduce.MODULES = ('toys',)\n"
        f"{code}\n"
        "EXPERIMENTS = [Mine]\n"
        "if __name__ == '__main__':\n"
        "    outcome = runner.reproduce([Mine.name], out=sys.argv[1], jobs=2)\n"
        "    print(sorted(row['square'] for row in outcome.rows[Mine.name]), sorted(outcome.failed.items()))\n"
    )
    words = [sys.executable, str(tmp_path / "toys.py"), str(tmp_path / "rows")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_two_processes_give_the_rows_of_one_and_tell_their_own_threads(tmp_path):
    code = (
        "import torch\n"
        "class Mine(Squares):\n"
        "    def run(self, cell, config, context):\n"
        "        return [{**row, 'had': torch.get_num_threads()} for row in super().run(cell, config, context)]"
    )
    assert run_with_processes(tmp_path, code) == "[1, 4, 9] []"
    (path,) = (tmp_path / "rows").glob("*.jsonl")
    for row in read(path):
        assert row["environment"]["threads"] == row["had"]
        assert f"-{row['had']}-threads_{row['environment']['date'][:10]}" in path.name


def test_a_cell_that_measures_time_runs_alone_and_last(tmp_path):
    code = (
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "class Mine(Squares):\n"
        "    def cells(self, config):\n"
        "        return [replace(cell, alone=cell.settings['number'] == 1) for cell in super().cells(config)]\n"
        "    def run(self, cell, config, context):\n"
        "        assert cell.alone == (__name__ == '__main__')  # in no other process\n"
        "        written = [line for path in Path(sys.argv[1]).glob('*.jsonl') for line in path.open()]\n"
        "        assert not cell.alone or len(written) == 2\n"
        "        return super().run(cell, config, context)"
    )
    assert run_with_processes(tmp_path, code) == "[1, 4, 9] []"


def test_a_process_that_dies_takes_no_other_cell_with_it(tmp_path):
    code = (
        "class Mine(Squares):\n"
        "    def run(self, cell, config, context):\n"
        "        return os._exit(1) if cell.settings['number'] == 2 else super().run(cell, config, context)\n"
    )
    assert run_with_processes(tmp_path, code) == "[1, 9] [('clustered-squares: number 2', 'its process died')]"


def test_a_figure_shows_the_rows_of_its_table(tmp_path):
    outcome = runner.reproduce(["clustered-shown", "clustered-squares"], out=tmp_path)
    assert outcome.rows["clustered-shown"] == outcome.rows["clustered-squares"]
    assert len(RAN) == 3


def test_pages(tmp_path):
    outcome = runner.reproduce(["clustered-squares"], out=tmp_path)
    (path,) = page.write(Squares(), "smoke", outcome.rows["clustered-squares"], tmp_path / "reproduce")
    text = path.read_text()
    for wanted in ("| 2 | 1.0 \\| 4.0 |", "3 rows.", "Nothing.", "Smoke scale", "Vyas et al. 2020"):
        assert wanted in text
    assert text.index("Smoke scale") < text.index("1.0 \\| 4.0") < text.index("3 rows.")
    (tmp_path / "bench_x.jsonl").write_text(json.dumps({"theme": "bench", "method": "a<b", "seconds": 0.5}) + "\n")
    html = write_page(tmp_path, tmp_path / "page.html").read_text()
    for wanted in ("Table 99", "1.0 | 4.0", "bench_x.jsonl", "a&lt;b"):
        assert wanted in html
    assert html.index("figures mean nothing") < html.index("1.0 | 4.0")
    links = re.findall(r'href="#([^"]+)"', html)
    assert {"clustered-squares", "bench_x.jsonl", "paper-1", "other-rows"} <= set(links)
    assert set(links) <= set(re.findall(r' id="([^"]+)"', html)), "a link that leads nowhere"
    with pytest.raises(ValueError, match="--results, a folder"):
        write_page(tmp_path / "nowhere", tmp_path / "page.html")


def test_a_method_has_one_name_whatever_its_paper_calls_it():
    class Theirs(Squares):
        def tables(self, rows, config):
            return [
                Table("lsh against e2lsh", ["method", "lsh-4"], [["lsh-1", "1"]], ["lsh needs queries that are keys"])
            ]

        def findings(self, rows, config):
            return ["clustered is ahead of lsh-1."]

    read = page.shown(Theirs(), "smoke", [])
    renamed = Table("reformer against e2lsh", ["method", "reformer-4"], [["reformer-1", "1"]])
    assert read.tables == [replace(renamed, notes=["reformer needs queries that are keys"])]
    assert read.findings == ["clustered is ahead of reformer-1."]
    assert read.differences == ["Nothing.", page.ONE_NAME]  # and whoever looks for the paper's word finds it
    assert page.shown(Squares(), "smoke", []).differences == ["Nothing."]


def test_numbers_beside_numbers():
    assert beside(5.14, [6.0]) == "5.1 | 6.0"
    assert beside(None, [0.5, 0.7], digits=0, times=100) == "– | 60 ± 14"
    assert beside("–", []) == "– | …"
    assert spread([1.0, 1.0]) == "1.0 ± 0.0"


def run(*words):
    return CliRunner().invoke(build(), ["reproduce", *map(str, words)])


def test_the_command(tmp_path):
    assert "clustered-squares" in run("--list").output
    done = run("clustered-squares", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.output.index("figures mean nothing") < done.output.index("1.0 | 9.0")
    assert (tmp_path / "reproduce" / "clustered-squares-smoke.md").exists()
    for words, sentence in (
        (["clustered-table77"], "wanted an experiment"),
        ([], "wanted the name of an experiment"),
        (["clustered-squares", "--scale", "huge"], "wanted a scale"),
        (["clustered-squares", "--only", "("], "wanted --only, a regular expression"),
    ):
        refused = run(*words, "--out", tmp_path / "new")
        assert refused.exit_code == 2
        assert sentence in refused.output
        assert not (tmp_path / "new").exists()
    in_a_file = run("clustered-squares", "--out", tmp_path / "reproduce" / "clustered-squares-smoke.md" / "deeper")
    assert in_a_file.exit_code == 2
    assert "wanted --out, a folder; got" in in_a_file.output


def test_the_command_tells_what_has_no_rows_yet(tmp_path):
    run("clustered-squares", "--only", "1|2", "--out", tmp_path)
    everywhere = run("--missing", "--out", tmp_path).output
    assert [line.split() for line in everywhere.splitlines() if "clustered" in line] == [
        ["clustered-squares", "1", "3"],  # clustered-shown takes its rows from there
        ["clustered-slower", "2", "2"],
    ]
    assert "clustered-squares: number 3" in run("clustered-shown", "--missing", "--out", tmp_path).output
    run("clustered-squares", "--out", tmp_path)
    assert "every cell has rows" in run("clustered-squares", "--missing", "--out", tmp_path).output
    assert "wanted a scale" in run("--missing", "--scale", "huge", "--out", tmp_path).output
    assert len(RAN) == 3


def test_the_command_tells_of_cells_that_failed(tmp_path, monkeypatch):
    monkeypatch.setitem(Squares.scales, "smoke", replace(Config(), bad=2))
    failed = run("clustered-squares", "--out", tmp_path)
    assert failed.exit_code == 1
    assert "no square here" in failed.output
    assert "1.0 | 9.0" in failed.output


def test_missing_data_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "needs", ("an4",))
    for words in ((), ("--data", tmp_path), ("--data", tmp_path / "nowhere")):
        refused = run("clustered-squares", "--scale", "small", "--out", tmp_path, *words)
        assert refused.exit_code == 2
        assert "an4" in refused.output or "nowhere" in refused.output
    assert RAN == []


def test_data_in_a_folder_or_in_an_archive(tmp_path, monkeypatch):
    import tarfile

    from clusterattn_papers.tasks.files import folder_of

    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    (tmp_path / "data" / "text" / "mr-set").mkdir(parents=True)
    (tmp_path / "data" / "text" / "mr-set" / "a.txt").write_text("x")
    assert folder_of(tmp_path / "data", "mr") == tmp_path / "data" / "text" / "mr-set"
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed" / "mr.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "data" / "text" / "mr-set", "mr-set")
    unpacked = folder_of(tmp_path / "packed", "mr")
    assert (unpacked / "mr-set" / "a.txt").read_text() == "x"
    assert folder_of(tmp_path / "packed", "mr") == unpacked


@pytest.mark.parametrize("spec", ["refined", "refined:clusters=25,top=8", "improved:clusters=25", "clustered"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_methods_of_experiments_do_not_follow_the_shape_of_a_call(spec: str, causal: bool) -> None:
    """Whatever the library comes to choose for sizes left open, a row's configuration means what it meant."""
    method = pinned(spec)
    short, long = (method.at(n, n, 64, 64, causal=causal, group=2) for n in (512, 60_000))
    assert short == long
    assert (getattr(short, "parts", 1), getattr(short, "slope", False)) == (1, False)
