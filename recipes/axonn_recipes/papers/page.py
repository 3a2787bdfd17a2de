"""The page: published and obtained numbers beside each other, as HTML with the pictures and as Markdown; and the table of coverage."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from axonn_recipes.papers.data import Number, Row, Value
from axonn_recipes.papers.experiments import EXPERIMENTS
from axonn_recipes.papers.verdict import Compared, Judged

TITLE = "Published and obtained"
HEADER = ("", "published", "obtained", "off by", "tolerance", "how", "verdict", "where")
STYLE = (
    "body{font:15px sans-serif;margin:2em auto;max-width:75em}table{border-collapse:collapse;margin:.5em 0}"
    "td,th{border:1px solid #bbb;padding:.2em .6em;text-align:left}img{max-width:48%;vertical-align:top}"
    ".agrees{background:#d9f2d9}.differs{background:#f7d4d4}.p{color:#555}"
)


def shown(value: Value | None, digits: int = 4) -> str:
    """A value in so many digits."""
    if isinstance(value, list):
        return f"({', '.join(shown(one, digits) for one in value)})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def allowed(number: Number) -> str:
    """The tolerance in words."""
    if number.needs:
        return "-"
    if number.within is not None:
        return f"{number.within:g} {number.unit}".rstrip()
    return "exact" if isinstance(number.published, bool | str | list) else f"{100 * number.tolerance:g}%"


def cells(one: Compared) -> tuple[str, ...]:
    """A number's row of the table, by `HEADER`."""
    number = one.number
    unit = f" {number.unit}" if number.unit else ""
    off = "-" if one.error is None else f"{one.error:+.1%}"
    verdict = f"needs the machine: {number.needs}" if one.verdict == "needs the machine" else one.verdict
    verdict += f": {one.contradicted}" if one.contradicted else ""
    obtained = "-" if one.obtained is None else shown(one.obtained) + unit
    return (
        number.what,
        shown(number.published, 6) + unit,
        obtained,
        off,
        allowed(number),
        one.how,
        verdict,
        number.where,
    )


def summary(judged: Sequence[Judged]) -> str:
    """Number of rows and of numbers that agree, in a sentence."""
    rows = Counter(one.verdict.partition(":")[0] for one in judged)
    numbers = Counter(one.verdict for row in judged for one in row.compared)
    said = [", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) for kinds in (rows, numbers)]
    return f"{len(judged)} tables and figures: {said[0]}." + (f" Their numbers: {said[1]}." if said[1] else "")


def markdown(judged: Sequence[Judged], pictures: Mapping[str, Sequence[Path]]) -> str:
    """The page as Markdown.

    Args:
        judged: the rows.
        pictures: of each experiment, relative to the page.
    """
    parts = [f"# {TITLE}", summary(judged)]
    for one in judged:
        parts += [f"## {one.row.name}: {one.verdict}", one.row.caption, *said(one)]
        if one.compared:
            parts.append(table(HEADER, [cells(each) for each in one.compared]))
        parts += [f"![{file.stem}]({file})" for file in drawn(one, pictures)]
    return "\n\n".join(parts) + "\n"


def page(judged: Sequence[Judged], pictures: Mapping[str, Sequence[Path]]) -> str:
    """The same as HTML."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title><style>{STYLE}</style></head><body>',
        f"<h1>{TITLE}</h1><p>{html.escape(summary(judged))}</p>",
    ]
    for one in judged:
        parts.append(f'<h2 id="{one.row.name}">{html.escape(f"{one.row.name}: {one.verdict}")}</h2>')
        parts += [f'<p class="p">{html.escape(text)}</p>' for text in (one.row.caption, *said(one))]
        if one.compared:
            parts.append("<table><tr>" + "".join(f"<th>{title}</th>" for title in HEADER) + "</tr>")
            for each in one.compared:
                line = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(each))
                parts.append(f'<tr class="{each.verdict.partition(" ")[0]}">{line}</tr>')
            parts.append("</table>")
        parts += [f'<img src="{html.escape(str(file))}" alt="{file.stem}">' for file in drawn(one, pictures)]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def said(one: Judged) -> list[str]:
    """The lines above a row's numbers."""
    row = one.row
    lines = [f"How: {one.how}. By itself: `{row.command}`"] if row.runs else []
    lines += [row.note] if row.note else []
    lines += [f"Only a machine can show: {row.lacking}"] if row.lacking else []
    return lines + [found.note for found in one.found.values() if found.note]


def drawn(one: Judged, pictures: Mapping[str, Sequence[Path]]) -> list[Path]:
    """A row's pictures."""
    return [file for name in one.found for file in pictures.get(name, ())]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def coverage(rows: Sequence[Row]) -> str:
    """The table of coverage as Markdown."""
    counts = Counter(row.coverage for row in rows)
    how = lambda row: ", ".join(dict.fromkeys(EXPERIMENTS[name].kind for name in row.runs)) or "-"  # noqa: E731
    lines = [
        (
            row.seed,
            row.number,
            row.caption,
            row.claim,
            how(row),
            str(sum(not number.needs for number in row.numbers)) if row.numbers else "-",
            f"`{row.command}`" if row.command else "-",
            row.coverage,
            row.lacking or "-",
        )
        for row in rows
    ]
    titles = ("seed", "number", "what it shows", "claim", "how", "numbers", "command", "coverage", "needs the machine")
    said = ", ".join(f"{counts[kind]} {kind}" for kind in ("full", "partly", "none", "n/a"))
    return (
        "# The papers' tables and figures\n\n"
        "Written by `axonn train papers --coverage docs/coverage.md` from recipes/axonn_recipes/papers/rows.toml; whether numbers agree is said by "
        f"`axonn train papers`.\n\n{len(rows)} tables and figures: {said} (n/a: diagrams, surveys, lists). Numbers are those that are obtained here "
        "and compared.\n\n" + table(titles, lines) + "\n"
    )
