"""The documentation site builds without a warning, is whole without a network, and its notebook runs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, script

pytest.importorskip("mkdocs")
pytest.importorskip("nbclient")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / "results").is_dir():
        pytest.skip("no results/ here: they stay out of the sdist")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **offline}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        found = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:)?//[^"]*"', page.read_text("utf-8"))
        assert found == [], page.name
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text("utf-8"), sheet.name


def test_links_between_pages_hold(site: Path) -> None:
    """Also those that mkdocs does not see: into pages from outside docs/, and to headings of generated pages."""
    known = {page: set(re.findall(r'\bid="([^"]+)"', page.read_text("utf-8"))) for page in site.rglob("*.html")}
    for page in known:
        for target, anchor in re.findall(r'<a [^>]*href="([^"#:?]*)(?:#([^"]*))?"', page.read_text("utf-8")):
            place = (page.parent / target).resolve() if target else page
            place = place / "index.html" if place.is_dir() else place
            if page.name == "404.html" or place not in known:
                assert page.name == "404.html" or place.exists(), f"{page.name}: {target}"
            elif anchor and not anchor.startswith("__"):
                assert anchor in known[place], f"{page.name}: {target}#{anchor}"


def test_equations_and_the_notebook_are_drawn(site: Path) -> None:
    methods = (site / "methods.html").read_text("utf-8")
    assert methods.count("<math") > 10
    assert "arithmatex" not in methods
    notebook = (site / "first-steps.html").read_text("utf-8")
    assert "data:image/png;base64," in notebook
    assert "ca.attention" in re.sub(r"<[^>]+>", "", notebook)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import clusterattn as ca

    known = {
        one for page in (site / "api").glob("*.html") for one in re.findall(r'\bid="([\w.]+)"', page.read_text("utf-8"))
    }
    names = {id(getattr(ca, name)): f"clusterattn.{name}" for name in ca.__all__}
    for module in ("nn", "hf", "parallel", "measure", "tuning"):
        part = importlib.import_module(f"clusterattn.{module}")
        for name in part.__all__:
            names.setdefault(id(getattr(part, name)), f"clusterattn.{module}.{name}")
    apart = {"__version__", "METHODS", "hosts", "measure", "nn", "parallel"}  # told of in words
    missing = []
    for path in names.values():
        start, _, name = path.rpartition(".")
        found = [one for one in known if one == path or (one.startswith(start) and one.endswith(f".{name}"))]
        missing += [path] if not found and name not in apart else []
    assert missing == []


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = script("notebook")
    done, kept = notebook.run(), notebook.nbformat.read(notebook.NOTEBOOK, as_version=4)
    for fresh, old in zip(done.cells, kept.cells, strict=True):
        assert fresh.source == old.source
        kinds = [[each.output_type for each in cell.get("outputs", [])] for cell in (fresh, old)]
        assert kinds[0] == kinds[1], "run make notebook"
