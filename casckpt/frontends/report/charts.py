"""The charts of a report, as SVG that matplotlib draws in the colors of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from casckpt.base.units import format_size
from casckpt.errors import Unsupported

try:
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator
except ImportError as error:
    raise Unsupported("a report needs matplotlib to draw its charts: pip install 'casckpt[report]'") from error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from casckpt.store.types import RunUsage

WIDTH: Final = 4.0  # inches; 384 pixels, so that text is not scaled down on a phone
POINTS: Final = 200  # per line; more would not be visible
GREEN, GREY = "#16a34a", "#8b949e"
_INK = "#010203"  # replaced by the color of the page's text
_SETTINGS: Any = {  # the actual type would list all names that matplotlib knows
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "text.parse_math": False,
    "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False,
}  # fmt: skip
_HEAT = LinearSegmentedColormap.from_list("heat", [(0.23, 0.51, 0.96, 0.07), (0.23, 0.51, 0.96, 1.0)])


@contextmanager
def _figure(height: float, salt: str) -> Iterator[tuple[Figure, Axes, list[str]]]:
    """Yield a figure, its axes, and a list that receives the SVG.

    ``salt``: a string that makes the chart's ids unique.
    """
    drawn: list[str] = []
    with mpl.rc_context(_SETTINGS | {"svg.hashsalt": salt}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.add_subplot(), drawn
        text = StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        drawn.append(_bare(text.getvalue()))


def _bare(svg: str) -> str:
    """Remove the parts that only a standalone file needs, and use the page's text color."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?)width="[\d.]+pt" height="[\d.]+pt"', r"\1", svg)
    svg = re.sub(r"(\d\.\d{2})\d+", r"\1", svg)
    return re.sub(r"\s*\n\s*", "\n", svg.replace(_INK, "currentColor")).strip()


def _bytes(axis: Any, most: int, marks: int = 5) -> None:
    """Set the ticks of an axis at round multiples of a unit of bytes, starting at 0."""
    unit = 1024 ** ((max(most, 1).bit_length() - 1) // 10)
    axis.set_ticks([value * unit for value in MaxNLocator(nbins=marks).tick_values(0, max(most, 1) / unit)][:-1])
    axis.set_major_formatter(_AS_SIZE)


_AS_SIZE = FuncFormatter(lambda value, _: format_size(int(value)).replace(".0 ", " "))


def thinned(count: int, most: int = POINTS) -> list[int]:
    """Return the indices to draw: evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def growth(logical: Sequence[int], stored: Sequence[int]) -> str:
    """Draw the cumulative size of all checkpoints as stored, and the size if each were stored separately."""
    chosen = thinned(len(logical))
    with _figure(2.6, "growth") as (_, axes, drawn):
        numbers = [place + 1 for place in chosen]
        mark = "o" if len(chosen) == 1 else ""
        for values, colour, name in ((logical, GREY, "separately"), (stored, GREEN, "stored")):
            shown = [values[place] for place in chosen]
            axes.plot(numbers, shown, color=colour, linewidth=1.8, label=name, marker=mark)
            axes.fill_between(numbers, shown, color=colour, alpha=0.12, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("checkpoints, oldest first")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        _bytes(axes.yaxis, max(logical))
        axes.legend(loc="upper left")
    return drawn[0]


def run_growth(run: str, steps: Sequence[int], sizes: Sequence[int], added: Sequence[int]) -> str:
    """Draw the size of each checkpoint of a run, and the bytes that it added, on a logarithmic scale."""
    chosen = thinned(len(steps))
    with _figure(2.4, f"run {run}") as (_, axes, drawn):
        for values, colour, name in ((sizes, GREY, "size of state"), (added, GREEN, "added")):
            axes.plot([steps[n] for n in chosen], [max(values[n], 1) for n in chosen], ".", color=colour, label=name)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(mpl.ticker.LogLocator(base=2, numticks=6))
        axes.minorticks_off()
        shown = [max(values[n], 1) for values in (sizes, added) for n in chosen]
        axes.set_ylim(min(shown) / 2, 2 * max(shown))  # so that ticks appear even if all values are close together
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.yaxis.set_major_formatter(_AS_SIZE)
        axes.legend(loc="best")
    return drawn[0]


def side_by_side(runs: Sequence[RunUsage]) -> str:
    """Draw the stored size of each run, and the part of it that is not shared with other runs."""
    with _figure(0.7 + 0.36 * len(runs), "runs") as (_, axes, drawn):
        places = list(range(len(runs)))
        axes.barh(places, [run.bytes_used for run in runs], color=GREEN, alpha=0.35, label="stored")
        axes.barh(
            places, [run.bytes_alone for run in runs], color=GREEN, height=0.4, label="not shared with other runs"
        )
        axes.set_yticks(places, [_short(run.run) for run in runs])
        axes.invert_yaxis()
        _bytes(axes.xaxis, max(run.bytes_used for run in runs), marks=4)
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.3 if len(runs) < 3 else -0.15), ncols=2)
    return drawn[0]


def heat_map(run: str, steps: Sequence[int], shares: Mapping[str, Sequence[float]]) -> str:
    """Draw the share of each layer, from 0 to 1, that changed at each step."""
    with _figure(min(0.9 + 0.16 * len(shares), 7.5), f"heat {run}") as (figure, axes, drawn):
        image = axes.imshow([*shares.values()], cmap=_HEAT, vmin=0, vmax=1, aspect="auto", interpolation="none")
        axes.set_yticks(range(len(shares)), [_short(name) for name in shares], fontsize=7)
        shown = thinned(len(steps), 6)
        axes.set_xticks(shown, [str(steps[place]) for place in shown])
        axes.set_xlabel("step")
        bar = figure.colorbar(image, ax=axes, location="top", shrink=0.6, aspect=30)
        bar.set_ticks([0, 0.5, 1], labels=["0 %", "50 %", "100 % changed"])
        bar.outline.set_visible(False)
    return drawn[0]


def _short(name: str) -> str:
    name = printable(name)
    return name if len(name) <= 24 else f"{name[:11]}...{name[-10:]}"


def printable(text: str) -> str:
    """Replace characters that are invisible or would break the page."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
