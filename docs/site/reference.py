"""The reference of the site: a page for each public name, of its docstring and of its example in docs/api/."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import casckpt

API = Path(__file__).resolve().parent.parent / "api"
_GIVERS = tuple(
    f"casckpt.{layer}." for layer in ("contents", "loading", "plan", "saving", "storage", "store", "upkeep")
)
_SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class ApiPage:
    """A page of docs/api/. ``examples``: name -> Markdown; names of one heading have the same."""

    module: str
    intro: str
    examples: dict[str, str]


def api_page(path: Path) -> ApiPage:
    """Read a page: its title is a module, each heading a name of that, or several."""
    text = path.read_text()
    intro = text.partition("\n## ")[0]
    found = {name: body.strip() for names, body in _SECTION.findall(text) for name in names.split(", ")}
    return ApiPage(intro.splitlines()[0].removeprefix("# "), intro, found)


def api_pages() -> dict[str, ApiPage]:
    """Read all of them, by the stem of the file."""
    return {path.stem: api_page(path) for path in sorted(API.glob("*.md")) if path.stem != "README"}


def public_names(module: ModuleType) -> list[str]:
    """Give what a module offers: what it says itself, else what it defines without an underscore."""
    if "__dir__" in vars(module):
        names = list(module.__dir__())
    else:
        here = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        names = list(getattr(module, "__all__", here))
    return sorted(name for name in names if not name.startswith("_") and not inspect.ismodule(getattr(module, name)))


def first_line(thing: object) -> str:
    """Give the first sentence of a docstring as one line; "" where there is none of its own."""
    doc = inspect.getdoc(thing) if callable(thing) and hasattr(thing, "__qualname__") else ""
    return (doc or "").split("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", "\\|")


def write(into: Path, only: Collection[str] | None = None) -> None:
    """Write a page for each name, and one for each module that lists them, into a new folder. ``only``: of these."""
    shutil.rmtree(into, ignore_errors=True)
    shown: set[int] = set()
    into.mkdir(parents=True)
    (into / "values.md").write_text(_of_values())
    for stem, page in api_pages().items():
        if only is not None and stem not in only:
            continue
        module = import_module(page.module)
        folder = into / stem
        folder.mkdir(parents=True)
        for name in page.examples:
            thing = getattr(module, name)
            (folder / f"{name}.md").write_text(_of_name(page, name, thing, again=id(thing) in shown))
            shown.add(id(thing))
        (into / f"{stem}.md").write_text(_of_module(stem, page, module))


def values() -> list[type]:
    """Give the classes of what public methods give, and of what stands in their fields, in that order."""
    public = [getattr(casckpt, name) for name in casckpt.__all__]
    todo: list[type] = [one for one in public if inspect.isclass(one)]
    for one in todo:
        todo += [found for found in dict.fromkeys(_given_by(one)) if found not in todo]
    return [one for one in todo if one not in public]


def _given_by(one: type) -> Iterator[type]:
    """Give the dataclasses of casckpt that its methods, properties and fields name as what they give."""
    module = sys.modules[one.__module__]
    members = [getattr(value, "fget", value) for name, value in vars(one).items() if not name.startswith("_")]
    said = [str(getattr(member, "__annotations__", {}).get("return", "")) for member in members]
    if is_dataclass(one):
        said += [str(field.type) for field in fields(one) if not field.name.startswith("_")]
    for name in re.findall(r"\b[A-Z]\w+", " ".join(said)):
        found = _named(module, name)
        if inspect.isclass(found) and is_dataclass(found) and found.__module__.startswith(_GIVERS):
            yield found


def _named(module: ModuleType, name: str) -> object:
    """Give what ``name`` is in a module; what it imports for its types alone, too."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            origin = import_module(node.module or "")
            return getattr(origin, name, None) or _named(origin, name)  # it may import it for its types alone, too
    return getattr(module, name, None)


def _of_values() -> str:
    """Give the page of what methods give."""
    names = [f"{one.__module__}.{one.__qualname__}" for one in values()]
    found = "\n".join(f".. autoclass:: {name}\n   :members:\n   :no-index-entry:\n" for name in names)
    return f"# Values\n\nWhat methods give, and nobody makes by hand.\n\n```{{eval-rst}}\n{found}```\n"


def _of_name(page: ApiPage, name: str, thing: object, *, again: bool) -> str:
    example = page.examples[name].replace("](../", "](../../").replace("](dcp.md", "](../dcp.md")
    hidden = "\n   :no-index:" if again else ""  # in the index once, where it stands first
    return (
        f"# {name}\n\n```{{eval-rst}}\n{_directive(page.module, name, thing)}{hidden}\n```\n\n## Example\n\n{example}\n"
    )


def _directive(module: str, name: str, thing: object) -> str:
    if inspect.isclass(thing):
        kind = "exception" if issubclass(thing, BaseException) else "class"
        members = "" if kind == "exception" else "\n   :members:"
        return f".. auto{kind}:: {module}.{name}{members}"
    if inspect.isroutine(thing):
        return f".. autofunction:: {module}.{name}"
    return f".. py:data:: {module}.{name}\n   :value: {thing}"


def _of_module(stem: str, page: ApiPage, module: ModuleType) -> str:
    rows = "\n".join(f"| [{name}]({stem}/{name}.md) | {first_line(getattr(module, name))} |" for name in page.examples)
    tree = "\n".join(f"{stem}/{name}" for name in page.examples)
    toc = f"```{{toctree}}\n:hidden:\n\n{tree}\n```"
    return f"{page.intro.strip()}\n\n| name | what it is |\n| --- | --- |\n{rows}\n\n{toc}\n"


class _Bare(str):
    """Text that a signature shows as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def keywords(signature: inspect.Signature, known: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Give the parameters of a function, with those of ``**options: Unpack[T]`` by name. ``known``: T by name."""
    for parameter in signature.parameters.values():
        found = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        if parameter.name == "self":
            continue
        if found is None or found[1] not in known:
            said = parameter.annotation
            yield parameter.replace(annotation=_Bare(said) if isinstance(said, str) else said)
            continue
        for name, kind in known[found[1]].__annotations__.items():
            if name not in signature.parameters:
                said, left_out = _Bare(getattr(kind, "__forward_arg__", kind)), _Bare("...")
                yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=left_out, annotation=said)
