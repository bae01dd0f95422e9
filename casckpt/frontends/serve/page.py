"""The page that a person sees: the runs of a store, their steps, and how to load each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from casckpt._version import __version__
from casckpt.base.sizes import format_size
from casckpt.contents.checkpoint import Checkpoint
from casckpt.frontends.serve.names import commit_of

_MOST = 50  # steps of a run
_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem}pre{overflow-x:auto;padding:.6rem;border:1px solid #8886;border-radius:4px}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .8rem .2rem 0;"
    "border-bottom:1px solid #8884}code{font-size:.9em}"
)


def page_of(url: str, endpoint: str, repos: Mapping[str, Sequence[Checkpoint]], tags: Mapping[str, Checkpoint]) -> str:
    """The page. ``endpoint``: where this server answers."""
    runs = "".join(_run(repo, found, tags) for repo, found in repos.items()) or "<p>There is no checkpoint yet.</p>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>casckpt serve</title><style>{_STYLE}</style><h1>{escape(url)}</h1>"
        f"<p>casckpt {__version__}, read-only. Clients of the Hugging Face Hub load from it with</p>"
        f"<pre>export HF_ENDPOINT={escape(endpoint)}</pre>"
        f"<p><a href=report>Growth, runs and layers, in charts</a></p>{runs}</html>"
    )


def _run(repo: str, found: Sequence[Checkpoint], tags: Mapping[str, Checkpoint]) -> str:
    run, newest = found[-1].run, found[-1]
    called = "" if repo == run else f"<p>No hub takes this name: it is served as <code>{escape(repo)}</code>.</p>"
    call = f'AutoModel.from_pretrained("{repo}", revision="{newest.step}")'
    more = f"<p>... and {len(found) - _MOST} older ones.</p>" if len(found) > _MOST else ""
    rows = "".join(_rows(found[: -_MOST - 1 : -1], tags))
    return (
        f"<h2>{escape(run)}</h2>{called}<pre>{escape(call)}\nhf download {escape(repo)} --revision {newest.step}</pre>"
        f"<table><tr><th>revision<th>saved<th>size<th>tags<th>commit</tr>{rows}</table>{more}"
    )


def _rows(found: Sequence[Checkpoint], tags: Mapping[str, Checkpoint]) -> Iterator[str]:
    for one in found:
        named = ", ".join(sorted(name for name, tagged in tags.items() if tagged.id == one.id))
        size, saved = format_size(one.stats.bytes_total), f"{one.created_at:%Y-%m-%d %H:%M} UTC"
        yield f"<tr><td>{one.step}<td>{saved}<td>{size}<td>{escape(named)}<td><code>{commit_of(one.id)}</code></tr>"
