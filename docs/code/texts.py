"""Texts that stand elsewhere in the repository, on pages of the site, and links between all of them.

A page holds another text by a line with nothing but a link to it whose words begin with "include:",

    [include: samo/README.md](../../samo/README.md)
    [include: memory](../../samo/README.md#memory)
    [include: the rest](../../samo/README.md "without: Memory, Pruning")

the whole but its title, one section, or all but some sections. Whoever reads the page as a file has a link instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(r'^\[include: [^\]]*\]\(([^)\s#]+)(?:#([^)\s]+))?(?: "without: ([^"]*)")?\)$')
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^(#{1,6}) (.*)$")


def slug(heading: str) -> str:
    """The anchor of a heading, as MkDocs and code hosts make it."""
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
    return re.sub(r"\s+", "-", plain)


def lines(text: str) -> Iterator[tuple[str, bool]]:
    """Lines, and whether each is code of a fenced block."""
    fence = ""
    for line in text.splitlines():
        mark = re.match(r"\s*(```+|~~~+)", line)
        if fence:
            yield line, True
            if mark and line.strip() == fence:
                fence = ""
        else:
            fence = mark.group(1) if mark else ""
            yield line, bool(fence)


@dataclass
class Section:
    """A heading and what stands below it.

    Attributes:
        title: the heading's words.
        level: 1 for a page's title.
        body: lines up to the next heading of any level.
    """

    title: str
    level: int
    body: list[str] = field(default_factory=list)


def sections(text: str) -> list[Section]:
    """A text by its headings; what stands before the first has an empty title and level 0."""
    found = [Section("", 0)]
    for line, code in lines(text):
        heading = None if code else HEADING.match(line)
        if heading:
            found.append(Section(heading.group(2), len(heading.group(1))))
        else:
            found[-1].body.append(line)
    return found


def pick(text: str, only: str = "", without: str = "") -> list[Section]:
    """Sections to show, the title's heading left out.

    Args:
        text: in Markdown.
        only: the anchor of a section, whose heading is left out and whose parts rise to the second level; empty: all.
        without: titles of sections that are left out with all below them, with commas between.

    Raises:
        ValueError: there is no such section.
    """
    found = sections(text)
    if only:
        at = next((i for i, one in enumerate(found) if slug(one.title) == only), None)
        if at is None:
            raise ValueError(f"there is no section #{only}")
        level = found[at].level
        end = next((i for i in range(at + 1, len(found)) if found[i].level <= level), len(found))
        below = [Section(one.title, one.level - level + 1, one.body) for one in found[at + 1 : end]]
        return [Section("", 0, found[at].body), *below]
    left_out = {slug(one) for one in without.split(",") if one.strip()}
    if missing := left_out - {slug(one.title) for one in found}:
        raise ValueError(f"there is no section {', '.join(sorted(missing))}")
    kept, skipped = [], 0
    for one in found:
        if skipped and one.level > skipped:
            continue
        skipped = one.level if slug(one.title) in left_out else 0
        if not skipped:
            kept.append(Section("", 0, one.body) if one.level == 1 else one)
    return kept


def join(parts: list[Section]) -> str:
    """The sections as text."""
    out = []
    for one in parts:
        out += [f"{'#' * one.level} {one.title}"] * bool(one.level) + one.body
    return "\n".join(out)


class Site:
    """Where on the site each text of the repository is.

    Args:
        pages: texts of pages by their path below docs, such as systems/samo.md.
    """

    def __init__(self, pages: dict[str, str]) -> None:
        self.pages = pages
        self.places: dict[tuple[str, str], tuple[str, str]] = {}
        for page, text in pages.items():
            self.places.setdefault((f"docs/{page}", ""), (page, ""))
            for line, code in lines(text):
                if not code and (found := INCLUDE.match(line)):
                    self._include(page, *found.groups())

    def _include(self, page: str, path: str, only: str | None, without: str | None) -> None:
        source = self.resolve(f"docs/{page}", path)
        for number, one in enumerate(pick((ROOT / source).read_text(), only or "", without or "")):
            where = (page, slug(one.title) if one.title else "")
            self.places.setdefault((source, slug(one.title) or (only or "")), where)
            if not number and not only:
                self.places[source, ""] = (page, "")

    @staticmethod
    def resolve(source: str, target: str) -> str:
        """A link's target as a path from the repository's root."""
        return os.path.normpath(os.path.join(os.path.dirname(source), target))

    def render(self, page: str, picture: Callable[[str], str]) -> str:
        """A page with its includes, all links as MkDocs wants them.

        Args:
            page: its path below docs.
            picture: makes a file of the repository one of the site; returns its path below docs.

        Raises:
            ValueError: a link leads nowhere.
        """
        out = []
        for line, code in lines(self.pages[page]):
            found = None if code else INCLUDE.match(line)
            if found:
                path, only, without = found.groups()
                source = self.resolve(f"docs/{page}", path)
                text = join(pick((ROOT / source).read_text(), only or "", without or ""))
                out += [each if inside else self.link(each, source, page, picture) for each, inside in lines(text)]
            else:
                out.append(line if code else self.link(line, f"docs/{page}", page, picture))
        return "\n".join(out) + "\n"

    def link(self, line: str, source: str, page: str, picture: Callable[[str], str]) -> str:
        """A line of a text that stands in `source`, on a page."""

        def moved(found: re.Match[str]) -> str:
            image, words, target = found.groups()
            if re.match(r"[a-z]+:", target):
                return found.group()
            path, _, anchor = target.partition("#")
            whole = self.resolve(source, path) if path else source
            if image:
                return f"![{words}]({os.path.relpath(picture(whole), os.path.dirname(page) or '.')})"
            place = self.places.get((whole, anchor)) or self.places.get((whole, ""))
            if place is not None:
                to, at = place if (whole, anchor) in self.places or not anchor else (place[0], anchor)
                return f"[{words}]({os.path.relpath(to, os.path.dirname(page) or '.')}{'#' + at if at else ''})"
            if not (ROOT / whole).exists():
                raise ValueError(f"{source} has a link to {target}, which is not there")
            return words if words.strip("`").rstrip("/") == whole else f"{words} (`{whole}`)"

        return LINK.sub(moved, line)
