"""The wheel: it builds, carries what it needs, and asks for torch alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("typer", "rich", "matplotlib", "jinja2", "safetensors", "transformers")


def run(*words: str, cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and an sdist, as `make dist` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    words = ("--wheel", "--sdist", "--no-isolation", "--outdir", str(folder), str(ROOT))
    run(sys.executable, "-m", "build", *words)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (made,) = dist.glob("*.whl")
    return made


def test_an_index_would_accept_them(dist: Path) -> None:
    pytest.importorskip("twine")
    made = sorted(dist.iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    assert run(sys.executable, "-m", "twine", "check", "--strict", *map(str, made)).count("PASSED") == 2


def test_the_sdist_carries_tests_and_docs_but_no_results(dist: Path) -> None:
    (made,) = dist.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "mkdocs.yml", "docs/guide.md", "tests/laws.py", "Makefile"} <= names
    assert not any(name.startswith(("results/", "site/", ".venv/")) for name in names)


def test_the_version_is_told_once() -> None:
    """The package, the citation and the changelog agree, but for what is added to a version in the making."""
    (plain,) = re.findall(
        r'^__version__ = "(\d+\.\d+\.\d+)', (ROOT / "clusterattn" / "_version.py").read_text(), re.MULTILINE
    )
    assert f"version: {plain}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {plain} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_carries_types_data_and_templates_but_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    here = [
        path
        for package in ("clusterattn", "clusterattn_papers")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert {str(path.relative_to(ROOT)) for path in here} <= names
    assert "clusterattn/py.typed" in names
    assert any(name.startswith("clusterattn/data/") and name.endswith(".safetensors") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/", "results/")) for name in names)


def test_the_samples_are_small(wheel: Path) -> None:
    sizes = {Path(info.filename).name: info.file_size for info in zipfile.ZipFile(wheel).infolist()}
    assert sizes["minilm_alice.safetensors"] <= 2 * 2**20
    assert sizes["tabpfn_mnist.safetensors"] <= 4 * 2**20


def test_torch_is_the_only_hard_dependency(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    hard = [need for need in metadata.get_all("Requires-Dist") or [] if "extra ==" not in need]
    assert len(hard) == 1
    assert hard[0].startswith("torch>=")
    assert {"cli", "hf", "dev"} <= set(metadata.get_all("Provides-Extra") or [])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert archive.read(name.replace("METADATA", "entry_points.txt")).decode().split() == [
        "[console_scripts]",
        "clusterattn",
        "=",
        "clusterattn.cli:main",
    ]


def test_the_wheel_installs_and_answers_elsewhere(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(place),
        str(wheel),
    )
    says = run(
        sys.executable,
        "-c",
        "import clusterattn as ca, torch; x = torch.randn(1, 2, 40, 8);"
        "print(ca.__file__); print(tuple(ca.attention(x, x, x).shape))",
        cwd=tmp_path,
        PYTHONPATH=str(place),
    ).splitlines()
    assert says[0].startswith(str(place))
    assert says[1] == "(1, 2, 40, 8)"


def test_importing_the_core_imports_no_extra() -> None:
    code = f"import clusterattn, sys; print([name for name in {EXTRAS} if name in sys.modules])"
    assert run(sys.executable, "-c", code).strip() == "[]"


# ---- what an import brings -----------------------------------------------------------------------

ATTENTION = ("ops", "methods")  # folders that attention is made of
FILES = {"", "_attention", "_checks", "_replay", "_types", "_errors", "_version", "_moved"}


def brought() -> list[str]:
    """Our modules that a bare import loads, without the package's name."""
    code = "import clusterattn, sys; print(*(name for name in sys.modules if name.startswith('clusterattn')))"
    return [name.removeprefix("clusterattn").removeprefix(".") for name in run(sys.executable, "-c", code).split()]


def test_importing_the_library_loads_attention_alone() -> None:
    names = brought()
    assert [name for name in names if name.split(".")[0] not in ATTENTION and name not in FILES] == []
    kernels = [name for name in names if "kernels" in name or name in ("ops.coarse.near", "ops.kmeans.moments")]
    assert len(names) - len(kernels) <= 40


def test_importing_the_library_is_quick_beside_torch() -> None:
    code = (
        "import time; a = time.perf_counter(); import torch\n"
        "try: import triton.language\n"  # torch's own, which kernels are written in
        "except ModuleNotFoundError: pass\n"
        "b = time.perf_counter(); import clusterattn; print(b - a, time.perf_counter() - b)"
    )
    times = [tuple(map(float, run(sys.executable, "-c", code).split())) for _ in range(3)]
    torch_alone, ours = (min(each) for each in zip(*times, strict=True))
    assert ours < 0.25 * torch_alone


def test_everything_public_is_listed_and_there() -> None:
    import clusterattn as ca

    assert {*ca.__all__, "hf"} == set(dir(ca))
    for name in ca.__all__:
        assert getattr(ca, name) is not None
    assert callable(ca.tune)


# ---- old names -----------------------------------------------------------------------------------

OLD = {
    "import clusterattn as ca; found = ca.tasks.task_named": "clusterattn_papers.tasks",
    "import clusterattn as ca; ca.train; found = ca.train.fit": "clusterattn_papers.train.loop",
    "import clusterattn as ca; found = ca.reproduce.Experiment": "clusterattn_papers.reproduce._experiment",
    "import clusterattn as ca; found = ca.NeuralClustering": "clusterattn_papers.clustering",
    "from clusterattn.clustering import NeuralClustering as found": "clusterattn_papers.clustering",
    "from clusterattn.tasks.glue import Glue as found": "clusterattn_papers.tasks.glue",
    "import clusterattn.models.text as text; found = text.Classifier": "clusterattn_papers.models.text",
}


ONE_BY_ONE = """
import importlib, os, sys, warnings, torch, transformers  # the slow ones once, for all
for code in sys.argv[1:]:
    if os.fork():  # each old name meets a fresh clusterattn
        os.wait()
        continue
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(code)
    ours = [each for each in caught if "clusterattn" in str(each.message)]
    same = getattr(importlib.import_module(found.__module__), found.__name__) is found
    print(found.__module__, same, len(ours), ours[0].category.__name__, ours[0].filename)
    break
"""


def test_an_old_name_leads_to_the_one_copy_and_warns_once() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    told = run(sys.executable, "-c", ONE_BY_ONE, *OLD).splitlines()
    assert told == [f"{module} True 1 DeprecationWarning <string>" for module in OLD.values()]
