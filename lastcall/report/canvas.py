"""matplotlib to inline SVG: the same bytes each time, text kept as text, colours that follow the page.

Figures are drawn in stand-in colours which become CSS variables, each with its light value as fallback.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = {
    "ink": "#010101",
    "muted": "#010102",
    "line": "#010103",
    "band": "#010104",
    "paper": "#010105",
    "blue": "#010106",
    "orange": "#010107",
    "green": "#010108",
    "red": "#010109",
}
"""Stand-in colours by the name of their CSS variable."""

_LIGHT = {
    "ink": "currentColor",
    "muted": "#5c656e",
    "line": "#d8dce0",
    "band": "#eef1f4",
    "paper": "#ffffff",
    "blue": "#0072b2",
    "orange": "#c2650a",
    "green": "#00805e",
    "red": "#cc4b00",
}

_RC: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
    "text.parse_math": False,
    "text.color": PALETTE["ink"],
    "axes.edgecolor": PALETTE["muted"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": PALETTE["muted"],
    "axes.labelpad": 6,
    "axes.labelsize": 12,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "grid.color": PALETTE["line"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 12,
    "lines.solid_capstyle": "butt",
    "patch.linewidth": 0.6,
    "xtick.color": PALETTE["muted"],
    "ytick.color": PALETTE["muted"],
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "ytick.left": False,
}


def draw(title: str, description: str, width: float, height: float, paint: Callable[[Axes], None]) -> str:
    """One inline SVG of `width` × `height` CSS pixels, painted on one pair of axes.

    `title` and `description` are what a screen reader says of it.
    """
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        settings: Any = _RC | {"svg.hashsalt": title}
        matplotlib.rcParams.update(settings)
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        paint(figure.add_subplot())
        buffer = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=metadata)
    return _inline(buffer.getvalue(), title, description, width, height)


def _inline(svg: str, title: str, description: str, width: float, height: float) -> str:
    """The body of matplotlib's SVG file, fit to stand inside a page."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL).replace("xlink:href", "href")
    used = set(re.findall(r"#(\w+)", body))
    body = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", body)
    body = re.sub(r"<[^<>]*>", lambda tag: _tidy_tag(tag[0]), body)
    body = re.sub(r">\s+<", ">\n<", body).strip()
    return (
        f'<svg role="img" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">\n'
        f"<title>{html.escape(title)}</title>\n<desc>{html.escape(description)}</desc>\n{body}\n</svg>"
    )


def _tidy_tag(tag: str) -> str:
    """A tag with two decimals, the page's font and the page's colours."""
    tag = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}", tag)
    tag = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font, system-ui, sans-serif)", tag)
    for name, colour in PALETTE.items():
        tag = tag.replace(colour, f"var(--{name}, {_LIGHT[name]})")
    return " ".join(tag.split())
