"""Small SVG figures of rectangles, lines, arrows and text, for :mod:`distconv.pictures` and the docs.

Figures have a light background of their own, so that they can be read on dark pages.
"""

from __future__ import annotations

from html import escape

INK, MUTED, PAPER = "#1f2933", "#52606d", "#fbfbf8"
COLORS = ("#9ec5e8", "#f6c28b", "#b5dba9", "#e6b3cf", "#cfc3ea", "#f2e28d", "#a9dcd6", "#e3b7a0")
"""Fill colors of ranks, repeated for more than eight."""


def color_of(rank: int) -> str:
    """Return the fill color of a rank.

    >>> color_of(8) == color_of(0)
    True
    """
    return COLORS[rank % len(COLORS)]


class Drawing:
    """A figure with coordinates in pixels, from the upper left corner.

    Parameters
    ----------
    width, height : float
        Size in pixels; pages scale the figure to their width.
    title : str
        Alternative text for readers who do not see the figure.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._shapes: list[str] = []

    def rectangle(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = INK,
        dashed: bool = False,
    ) -> None:
        """Draw a rectangle.

        Parameters
        ----------
        x, y : float
            Upper left corner.
        width, height : float
            Size in pixels.
        fill, stroke : str
            Colors.
        dashed : bool
            Draw a dashed outline.
        """
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        anchor: str = "middle",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        """Write one line of text; nothing if it is empty.

        Parameters
        ----------
        x, y : float
            Position of the baseline.
        words : str
            The text.
        size : float
            Font size.
        anchor : {"start", "middle", "end"}
            The point of the line of text that is at ``x``.
        color : str
            Color of the letters.
        bold : bool
            Use bold letters.
        """
        if not words:
            return
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{color}"{weight}>'
            f"{escape(words, quote=False)}</text>"
        )

    def line(
        self, x0: float, y0: float, x1: float, y1: float, *, color: str = INK, arrow: bool = False, dashed: bool = False
    ) -> None:
        """Draw a line from (x0, y0) to (x1, y1).

        Parameters
        ----------
        x0, y0, x1, y1 : float
            Ends of the line.
        color : str
            Color of the line.
        arrow : bool
            Draw an arrow head at the end.
        dashed : bool
            Draw a dashed line.
        """
        head = ' marker-end="url(#head)"' if arrow else ""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._shapes.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{color}" stroke-width="1.5"{head}{dashes}/>'
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
                f'width="{self.width:g}" role="img" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
                f"<title>{escape(self.title, quote=False)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
                f'<rect width="{self.width:g}" height="{self.height:g}" rx="6" fill="{PAPER}"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )
