"""MkDocs asks this for what is not a file below docs, and for each page's text with what it includes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import api
import block
import commands
import messages
from mkdocs.structure.files import File, Files
from texts import ROOT, Site

DOCS = ROOT / "docs"
PICTURES = "pictures"


def made() -> dict[str, str]:
    """Pages that are made from the code, and those of recipes, by their path below docs."""
    pages = {
        "reference/block.md": block.page(),
        "reference/commands.md": commands.page(),
        "reference/recipes.md": commands.recipe_page(),
    }
    pages |= {f"reference/api/{module}.md": api.page(module) for module in api.MODULES}
    return pages | recipes()


def recipes() -> dict[str, str]:
    """A page for the README of each recipe and benchmark."""
    pages = {}
    for readme in sorted((ROOT / "recipes" / "axonn_recipes").rglob("README.md")):
        name = "-".join(readme.parent.relative_to(ROOT / "recipes" / "axonn_recipes").parts)
        title = readme.read_text().partition("\n")[0].removeprefix("# ")
        path = readme.relative_to(ROOT).as_posix()
        pages[f"measured/{name}.md"] = f"# {title}\n\n[include: {path}](../../{path})\n"
    return pages


def on_config(config: Any) -> Any:
    """Fill the menus of pages that are made."""
    api_pages = [f"reference/api/{module}.md" for module in api.MODULES]
    measured = [path for path in recipes() if path.startswith("measured/")]
    for entry in config["nav"]:
        for title, inner in entry.items() if isinstance(entry, dict) else ():
            if title == "Measured":
                inner[:] = measured
            for each in inner:
                if isinstance(each, dict) and "API" in each:
                    each["API"] = api_pages
    return config


_site: Site
_pictures: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Add what is made, and all pictures of READMEs."""
    global _site
    pages = made()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for file in files.documentation_pages():
        if file.src_uri not in pages:
            pages[file.src_uri] = Path(str(file.abs_src_path)).read_text()
    _site = Site(pages)
    for path in pages:
        _site.render(path, _picture)
    for source, path in _pictures.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A page's text with what it includes."""
    text = _site.render(page.file.src_uri, _picture)
    marker = "[errors: all of them]"
    return text.replace(marker, messages.tables()) if marker in text else text


def _picture(source: str) -> str:
    """Where on the site a picture of the repository is."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    path = f"{PICTURES}/{source.replace('/', '-')}"
    _pictures[source] = path
    return path
