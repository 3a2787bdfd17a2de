"""Links lead somewhere, paths are there, and drawings are what their code draws."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.texts import ROOT, TEXTS

import drawings  # isort: skip  # noqa: E402 - its folder is on the path by the line above
import messages  # isort: skip  # noqa: E402
import texts  # isort: skip  # noqa: E402

PATH = re.compile(r"`((?:axonn_tp|docs|plugins|recipes|samo|ted_moe|tests)/[\w./-]+?)/?`")
MADE = (
    "docs/reference/block.md",
    "docs/reference/commands.md",
    "docs/reference/recipes.md",
    "docs/reference/api/",
    "docs/measured/",
)
"""Pages that are made when the site is built, whose strict build looks at them."""


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_and_paths(file) -> None:
    source = str(file.relative_to(ROOT))
    text = "\n".join(line for line, code in texts.lines(file.read_text()) if not code)
    for _, _, target in texts.LINK.findall(re.sub(r"`[^`]*`", "", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        whole = texts.Site.resolve(source, path) if path else source
        if whole.startswith(MADE):
            continue
        assert (ROOT / whole).exists(), f"{source}: {target}"
        if anchor:
            assert anchor in anchors(whole), f"{source}: {target}"
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), f"{source} names {path}"


def anchors(source: str) -> set[str]:
    """Of a text's headings, those that it includes, too."""
    found = set()
    for line, code in texts.lines((ROOT / source).read_text()):
        if code:
            continue
        if heading := texts.HEADING.match(line):
            found.add(texts.slug(heading.group(2)))
        if include := texts.INCLUDE.match(line):
            path, only, without = include.groups()
            inside = (ROOT / texts.Site.resolve(source, path)).read_text()
            found |= {texts.slug(one.title) for one in texts.pick(inside, only or "", without or "") if one.title}
    return found


def test_every_text_stands_once() -> None:
    """A long line on two pages is a text that was copied."""
    seen: dict[str, str] = {}
    for file in TEXTS:
        if "docs/coverage.md" in str(file):
            continue
        for line, code in texts.lines(file.read_text()):
            if not code and len(line) > 110:
                assert line not in seen, f"{file.relative_to(ROOT)} and {seen[line]}: {line}"
                seen[line] = str(file.relative_to(ROOT))


@pytest.mark.parametrize("draw", drawings.DRAWINGS, ids=lambda draw: draw.__name__)
def test_drawings_are_those_of_their_code(draw) -> None:
    assert (drawings.FOLDER / f"{draw.__name__}.svg").read_text() == str(draw()), "run: python docs/code/drawings.py"


def test_the_first_drawing_says_what_was_measured() -> None:
    """Each row of it stands in its README, and as a ratio in ours."""
    first = (ROOT / "README.md").read_text().partition("\n## ")[0]
    for one in drawings.MEASURED:
        source = (ROOT / one.source).read_text()
        assert one.theirs in source and one.ours in source
        assert one.peer in first and one.source in first
    assert [f"{float(one.theirs) / float(one.ours):.1f}" for one in drawings.MEASURED] == ["2.3", "1.1", "5.2"]


def test_sections_are_picked() -> None:
    text = "# T\n\nintro\n\n## A\n\na\n\n### B\n\nb\n\n## C\n\n```\n# no heading\n```\n"
    assert [one.title for one in texts.sections(text)] == ["", "T", "A", "B", "C"]
    assert texts.join(texts.pick(text, "a")).split() == ["a", "##", "B", "b"]
    assert texts.join(texts.pick(text, "", "A")).split() == ["intro", "##", "C", "```", "#", "no", "heading", "```"]
    with pytest.raises(ValueError, match="no section"):
        texts.pick(text, "d")


def test_errors_of_the_site_have_their_remedies() -> None:
    """Descriptions of keys are no errors, and a remedy that is a constant is written out."""
    found = messages.tables()
    assert found.count("\n| ") > 600
    assert "| axonn.samo.sparsity = 1 keeps nothing of any layer | use a lower share, such as 0.9 |" in found
    assert 'of x | give the embedding that starts the stream "whole_tokens": true in the plan' in found
    assert "Ranks along x" not in found


NOUNS = ("axonn_tp", "samo", "ted_moe", "plugins", "recipes", "docs/code")
RIDDLE = re.compile(r"(?:What|Whether|How|Of|By|Theirs|Ours|Itself|Those|That|Likewise)\b")


@pytest.mark.parametrize("folder", NOUNS)
def test_docstrings_say_what_a_thing_is(folder: str) -> None:
    """They open with the thing or what is done, not with a clause or a pronoun: "True if ...", "Number of ...", "The bytes that ..."."""
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for each in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
                said = each.value.value if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) else None
                if isinstance(said, str) and RIDDLE.match(said.strip()):
                    found.append(f"{file.relative_to(ROOT)}:{each.lineno}")
    assert not found
