"""What mkdocs is told beyond mkdocs.yml: pages that lie outside docs/, the notebook, equations.

- CHANGELOG.md and the papers' pages in results/reproduce/ become pages of the site, with their pictures. A link that
  leads to one of them is turned to its page; one that leads to any other file of the repository becomes its path.
- Cells of a notebook become Markdown, with the outputs that are stored in it.
- Equations become MathML while the site is built, which browsers draw by themselves.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAPERS = "results/reproduce"
OUTSIDE = {"CHANGELOG.md": "changelog.md"}  # path in the repository -> page of the site
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
EQUATION = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Pages from outside docs/."""
    for path in sorted((ROOT / PAPERS).glob("*")):
        files.append(File.generated(config, f"papers/{path.name}", abs_src_path=str(path)))
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    notebooks = [file for file in files if file.src_uri.endswith(".ipynb")]
    for file in notebooks:
        files.remove(file)
        files.append(_notebook(config, file))
    return files


def _notebook(config: Any, file: File) -> File:
    """A notebook as a page of Markdown under its own name."""
    notebook = json.loads(Path(str(file.abs_src_path)).read_text(encoding="utf-8"))
    return File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=markdown_of(notebook))


def markdown_of(notebook: dict[str, Any]) -> str:
    """Its cells one after another, each with what it printed or drew; pictures stand in the page itself."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="what the cell draws" src="data:image/png;base64,{png}">')
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that lead out of docs/."""
    source = page.file.src_uri
    here = {"papers": PAPERS}.get(posixpath.dirname(source), posixpath.join("docs", posixpath.dirname(source)))
    if source in OUTSIDE.values():
        here = ""

    def turned(found: re.Match[str]) -> str:
        picture, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target or target.startswith("data:"):
            return found[0]
        path = posixpath.normpath(posixpath.join(here, target))
        if path.startswith("docs/"):
            place = path.removeprefix("docs/").replace(".ipynb", ".md")
        elif path.startswith(PAPERS + "/"):
            place = path.replace(PAPERS, "papers", 1)
        elif path in OUTSIDE:
            place = OUTSIDE[path]
        else:
            return found[0] if picture else f"{words} (`{path}`)" if words.strip("`") != path else f"`{path}`"
        return f"{picture}[{words}]({posixpath.relpath(place, posixpath.dirname(source) or '.')}{anchor})"

    return LINK.sub(turned, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """LaTeX into MathML."""
    return EQUATION.sub(lambda found: _equation(html.unescape(found[2]), found[1] == "div"), content)


def _equation(text: str, display: bool) -> str:
    body = text.strip().removeprefix("\\(").removesuffix("\\)").removeprefix("\\[").removesuffix("\\]").strip()
    made = convert(body, display="block" if display else "inline")
    return f'<div class="equation">{made}</div>' if display else made
