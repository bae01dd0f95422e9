"""The pictures of the documentation: drawn from docs/pictures/*.dot, and kept beside them as SVG.

``python docs/site/pictures.py`` draws them anew, with graphviz-pure (the extra ``docs``), which needs nothing installed
and writes the same bytes everywhere. A picture says of which source it was made; a test compares.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
from hashlib import sha256
from pathlib import Path

PICTURES = Path(__file__).resolve().parent.parent / "pictures"
_STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
_IMAGE = re.compile(r"^!\[(?P<alt>[^\]]*)\]\(pictures/(?P<name>\w+)\.svg\)$", re.MULTILINE)


def mark(source: str) -> str:
    """Give what a picture says of its source."""
    return f"<!-- of {sha256(source.encode()).hexdigest()} -->"


def draw(source: str) -> str:
    """Draw a graph as SVG, in the color of the text around it. Raises CalledProcessError for a wrong source."""
    command = [f"{sysconfig.get_path('scripts')}/graphviz-pure", "-Tsvg"]
    drawn = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    svg = re.sub(r"<!--.*?-->\s*|<title>.*?</title>\s*", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<svg width="(\d+)pt" height="\d+pt"', r'<svg width="\1pt" style="max-width:100%;height:auto"', svg)
    svg = svg.replace('"black"', '"currentColor"').replace('fill="white"', 'fill="none"')
    svg = re.sub(r"<text (?![^>]*fill=)", '<text fill="currentColor" ', svg)
    head, rest = svg.split(">", 1)
    return f"{head}>{mark(source)}{_STYLE}{rest}"


def inlined(page: str) -> str:
    """Give the Markdown of a page with its pictures in it, so that they follow the colours that a reader has chosen."""
    return _IMAGE.sub(_inline, page)


def _inline(found: re.Match[str]) -> str:
    svg = (PICTURES / f"{found['name']}.svg").read_text().replace(_STYLE, "")
    svg = re.sub(r"\n\s*\n", "\n", svg).replace("<svg", f'<svg role="img" aria-label="{found["alt"]}"', 1)
    return f'<div class="picture">\n{svg.strip()}\n</div>'


if __name__ == "__main__":
    for path in sorted(PICTURES.glob("*.dot")):
        path.with_suffix(".svg").write_text(draw(path.read_text()))
