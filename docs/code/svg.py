"""Drawings as plain SVG: the same bytes whoever makes them, so that they can be kept beside the text and compared."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK, PAPER, PALE, GREY = "#1b2733", "#ffffff", "#eef2f6", "#8796a5"
BLUE, ORANGE, GREEN, VIOLET = "#4c8dd6", "#f0a04b", "#5aae77", "#9a78c8"
COLOURS = (BLUE, ORANGE, GREEN, VIOLET)
"""Colours of whatever is told apart in a drawing: ranks, experts, stages."""

Point = tuple[float, float]


class Drawing:
    """A picture on white, so that it can be read on a dark page, too.

    Args:
        width: in pixels.
        height: in pixels.
        title: what is seen on it, for those who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self.parts = [
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        said: str,
        *,
        size: int = 14,
        anchor: str = "middle",
        bold: bool = False,
        colour: str = INK,
        font: str = "",
    ) -> None:
        """Words whose baseline is at y; anchor is start, middle or end, font another family than the drawing's."""
        weight = ' font-weight="600"' if bold else ""
        weight += f' font-family="{font}"' if font else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(said)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = PALE, said: str = "", *, size: int = 14
    ) -> None:
        """A rectangle with words in its middle."""
        self.shape([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], fill)
        if said:
            self.text(x + width / 2, y + height / 2 + size * 0.36, said, size=size)

    def shape(self, corners: Sequence[Point], fill: str, opacity: float = 1.0) -> None:
        """A polygon."""
        points = " ".join(f"{x:g},{y:g}" for x, y in corners)
        faded = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        self.parts.append(f'<polygon points="{points}" fill="{fill}"{faded} stroke="{INK}" stroke-width="1.2"/>')

    def line(self, ends: Sequence[Point], colour: str = INK, *, arrow: bool = False, width: float = 1.6) -> None:
        """Straight lines through points, with an arrow's head at the last one."""
        points = " ".join(f"{x:g},{y:g}" for x, y in ends)
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')
        if arrow:
            self._head(ends[-2], ends[-1], colour)

    def _head(self, before: Point, tip: Point, colour: str) -> None:
        dx, dy = tip[0] - before[0], tip[1] - before[1]
        length = (dx * dx + dy * dy) ** 0.5
        ux, uy = dx / length * 9, dy / length * 9
        corners = [tip, (tip[0] - ux - uy / 2, tip[1] - uy + ux / 2), (tip[0] - ux + uy / 2, tip[1] - uy - ux / 2)]
        points = " ".join(f"{x:.4g},{y:.4g}" for x, y in corners)
        self.parts.append(f'<polygon points="{points}" fill="{colour}"/>')

    def __str__(self) -> str:
        body = "\n".join(self.parts)
        fonts = 'font-family="Helvetica, Arial, sans-serif"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} {fonts}>\n{body}\n</svg>\n'
