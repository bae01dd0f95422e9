"""The results of a soak of weeks: counts and curves, and where they stand in docs/reliability.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from soaking.books import Books
from soaking.weeks.ledger import Ledger

FILE = "result.json"
DOCS = Path(__file__).resolve().parents[3] / "docs"
COUNTED = ("thinned", "forgotten", "purged", "deleted_blobs", "deleted_bytes", "revoked", "copied")
BEGIN, END = "<!-- weeks -->\n", "<!-- end of weeks -->"
ALT = "Memory, open files, listing times, sizes and numbers of checkpoints over the hours of the soak"
INK = "#010203"  # stands for the color of the text around the picture
STYLE = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"  # of all pictures
POINTS = 400  # of a curve, at most
PANELS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "memory of the followers, MiB": (2**20, ("follow.rss",)),
    "open files of the followers": (1, ("follow.files",)),
    "listing by a follower, or by a new process, ms": (1e-3, ("follow.listing", "store_listing", "mirror_listing")),
    "casckpt list, stats, status, s": (1, ("list_seconds", "stats_seconds", "status_seconds")),
    "size, MiB": (2**20, ("store_bytes", "mirror_bytes")),
    "files": (1, ("store_files", "mirror_files")),
    "visible checkpoints": (1, ("store_checkpoints", "mirror_checkpoints")),
    "time until a save is durable, s": (1, ("costs.durable_seconds",)),
}
"""For each panel, its unit, and the names of the samples that it shows."""


def counts(told: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers in what a command printed."""
    found = {name: told[name] for name in COUNTED if told.get(name)}
    return {name: value if isinstance(value, int) else len(value) for name, value in found.items()}


def ran(books: Books) -> float:
    """Return for how many seconds all runs have run, so far."""
    return float(sum({one["run"]: one["seconds"] for one in books.lines("wall")}.values()))


def size_of(folder: Path) -> dict[str, int]:
    """Return the number and the bytes of all files below a folder, which others may delete meanwhile."""
    found = {"files": 0, "bytes": 0}
    for path in filter(Path.is_file, folder.rglob("*")):
        with suppress(FileNotFoundError):
            found["bytes"] += path.lstat().st_size
            found["files"] += 1
    return found


def _listed(found: Iterable[object]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in sorted(Counter(map(str, found)).items()))


def rows(books: Books, ledger: Ledger, commits: Mapping[str, str]) -> dict[str, str]:
    """Return what has happened, in numbers. ``commits``: of both libraries."""
    ends = {one["job"]: one["struck"] for one in books.lines("ends")}
    jobs = [one for one in books.lines("jobs") if one["number"] in ends]
    used, events = [*books.lines("commands")], Counter(one["event"] for one in books.lines("events"))
    done = {name: sum(one.get(name, 0) for one in used) for name in COUNTED}
    resumed, followed = [*books.lines("resumed")], [*books.lines("followed")]
    cpu = {one["run"]: one["cpu"] for one in books.lines("wall")}
    days = [datetime.fromtimestamp(one["began"], UTC) for one in books.lines("runs")]
    by, steps = [one["ranks"] for one in jobs], [abs(one["ahead"] - two["ahead"]) for one, two in pairwise(jobs)]
    failed, others = [*books.lines("failed")], sum(one["ranks"] != one["by"] for one in resumed)
    return {
        "wall time": f"{ran(books) / 3600:.2f} hours in {len(days)} runs, from {min(days):%Y-%m-%d}",
        "CPU time": f"{sum(cpu.values()) / 3600:.2f} hours",
        "saves": f"{len(ledger.saved):,} that became visible, of {len(ledger.begun):,} that began",
        "full disks": f"{events['full disk']}, on which {sum(one['full'] for one in failed)} saves failed",
        "jobs": f"{len(jobs)}, with ranks: {_listed(f'x {ranks}' for ranks in by)}",
        "ends of jobs": _listed(one["end"] for one in jobs if ends[one["number"]] and one["end"] != "end"),
        "resumes, all compared": f"{len(resumed)}, {others} of them on another number of ranks",
        "jobs by library": _listed(f"with {commits[one['library']][:8]}" for one in jobs),
        "clocks set by at least 10 minutes": str(sum(step > 600 for step in steps)),
        "reads by two followers, all compared": f"{sum(not one['gone'] for one in followed):,}",
        "commands": _listed(one["name"] for one in used if one["status"] == 0),
        "commands killed": str(sum(one["status"] != 0 for one in used)),
        "done by commands": ", ".join(f"{count:,} {name}" for name, count in done.items()),
        "lost mirrors, rebuilt": str(events["mirror lost"]),
        "ranks that did not end after another was killed": str(events["a rank did not end"]),
    }  # fmt: skip


def write(books: Books) -> None:
    """Write the table and the curves into the docs. Raises FileNotFoundError if the soak has not ended."""
    found: dict[str, str] = json.loads((books.folder / FILE).read_text())
    lines = ["| six weeks in a day | |", "|---|---|", *(f"| {what} | {count} |" for what, count in found.items())]
    table = "\n".join([*lines, "", f"![{ALT}](pictures/weeks.svg)", ""])
    page = DOCS / "reliability.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}")
    (DOCS / "pictures" / "weeks.svg").write_text(curves(books))


def curves(books: Books) -> str:
    """Draw the samples over the hours."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    look: Any = dict.fromkeys(colors, INK) | dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
    look |= {"svg.fonttype": "none", "svg.hashsalt": "weeks", "font.size": 7, "axes.facecolor": "none"}
    with mpl.rc_context(look), StringIO() as text:
        figure = Figure(figsize=(7.2, 8), layout="constrained", facecolor="none")
        for axes, (title, (unit, names)) in zip(figure.subplots(4, 2, sharex=True).flat, PANELS.items(), strict=True):
            axes.set_title(title, loc="left")
            drawn = [(label, *line) for name in names for label, line in _series(books, name, unit)]
            for label, hours, values in drawn:
                axes.plot(hours, values, linewidth=0.8, label=label)
            axes.set_ylim(bottom=0)
            if len(drawn) > 1:
                axes.legend(frameon=False)
        figure.supxlabel("hours")
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        svg = text.getvalue()
    svg = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    svg = re.sub(r"(\d\.\d)\d+", r"\1", svg).replace(INK, "currentColor").replace(">", f">{STYLE}", 1)
    return re.sub(r"\s*\n\s*", "\n", svg).strip() + "\n"


def _series(books: Books, name: str, unit: float) -> Iterator[tuple[str, tuple[list[float], list[float]]]]:
    """Yield the label and the points of each curve of a sample."""
    book, _, field = name.rpartition(".")
    files = {name.partition("_")[0]: [book or "sizes"]}
    if book == "follow":
        found = sorted(path.name for path in books.folder.glob("samples.follow-*"))
        files = {one: [path for path in found if one in path] for one in ("before", "after")}
    for label, paths in files.items():
        lines = sorted((one["at"] / 3600, one[field] / unit) for path in paths for one in books.lines(path))
        some = lines[:: -(-len(lines) // POINTS) or 1]
        yield label, ([at for at, _ in some], [value for _, value in some])
