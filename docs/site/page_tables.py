"""Tables that the site has and no page does: modules, settings, killed bugs, Hub folders, services, private names."""

from __future__ import annotations

import ast
import inspect
import json
import re
from importlib import import_module
from pathlib import Path

from planted import PLANTED

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "casckpt"


def modules(layer: str) -> str:
    """The modules of a layer ("package": those beside the layers), with the first line of each docstring."""
    paths = sorted((PACKAGE / layer).rglob("*.py") if layer != "package" else PACKAGE.glob("*.py"))
    rows = ["| module | what it is |", "| --- | --- |"]
    for path in paths:
        said = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
        if path.name != "__init__.py":
            rows.append(f"| `{path.relative_to(PACKAGE)}` | {said.replace('``', '`').replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def settings(module: str, kind: str) -> str:
    """The fields of a dataclass, with their defaults and with the comments above them that begin with "#:"."""
    rows = ["| argument | default | meaning |", "| --- | --- | --- |"]
    for declared in getattr(import_module(module), kind).__mro__[:-1]:
        text = inspect.getsource(declared)
        for said, name, default in re.findall(r"^((?:    #: .*\n)+)    (\w+): [^=\n]*(?:= (.*))?$", text, re.MULTILINE):
            meaning = said.replace("\n    #: ", " ").removeprefix("    #: ").strip()
            rows.append(f"| `{name}` | {f'`{default}` ' if default else ''}| {meaning} |")
    return "\n".join(rows)


def planted_bugs() -> str:
    """Which test kills which planted bug, from tools/planted.py."""
    rows = [f"| {one.name} | `{one.tests.removeprefix('tests/')}` |" for one in PLANTED]
    return "\n".join(["| planted bug | test |", "| --- | --- |", *rows])


def hub_folders() -> str:
    """Folders that libraries write, and how they come back from a store; from tests/data/hub_folders.json."""
    rows = ["| folder | layout | library | written as safetensors | left out |", "| --- | --- | --- | --- | --- |"]
    for name, row in json.loads((ROOT / "tests" / "data" / "hub_folders.json").read_text()).items():
        files = (", ".join(f"`{file}`" for file in row[column]) for column in ("as safetensors", "left out"))
        rows.append(f"| {name} | {row['layout']} | {row['library']} | {' | '.join(files)} |")
    return "\n".join(rows)


def places() -> str:
    """Which storage services are safe, and how they differ from S3; from tests/support/places.py."""
    from tests.support.places import table  # needs boto3

    return table()


def private_names() -> str:
    """The private names of other packages, and which modules use them; from tests/support/private_names.py."""
    from tests.support.private_names import table

    return table()


def inserted(text: str) -> str:
    """A page with its tables: each stands in place of a comment that asks for it."""
    text = re.sub(r"<!-- modules: (\w+) -->", lambda found: modules(found[1]), text)
    text = re.sub(r"<!-- settings: (\S+)\.(\w+) -->", lambda found: settings(found[1], found[2]), text)
    tables = (
        ("<!-- planted bugs -->", planted_bugs), ("<!-- hub folders -->", hub_folders), ("<!-- places -->", places),
        ("<!-- private names -->", private_names),
    )  # fmt: skip
    for comment, table in tables:
        text = text.replace(comment, table()) if comment in text else text
    return text
