"""Modules import only from lower layers, and only some modules import each library (docs/design.md). The tests read
the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "casckpt"

ROOMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("errors", ()),
    ("base", ("errors",)),
    ("format", ("base",)),
    ("storage", ("base",)),
    ("plan", ("format",)),
    ("tensors", ("format", "storage")),
    ("repository", ("format", "storage")),
    ("history", ("plan", "repository")),
    ("contents", ("history",)),
    ("ranks", ("contents",)),
    ("upkeep", ("contents",)),
    ("saving", ("ranks", "tensors")),
    ("loading", ("saving",)),
    ("store", ("loading", "upkeep")),
    ("frontends", ("store",)),
    ("cli", ("frontends",)),
)
"""Each package, and the packages right below it. It may import these, and all that they may import."""

BELOW: dict[str, frozenset[str]] = {}
for _room, _below in ROOMS:
    BELOW[_room] = frozenset(_below).union(*(BELOW[_one] for _one in _below))
"""What each package may import besides itself."""

FREE = {"__init__.py": "the public names", "_version.py": "imports nothing", "__main__.py": "is the command line"}
"""Modules outside the layers, and why."""


@dataclass(frozen=True)
class Fence:
    """Only ``places`` (folders or files of the package) may use ``modules`` and their contents."""

    modules: tuple[str, ...]
    places: tuple[str, ...]
    why: str
    but: tuple[str, ...] = ()  # names inside the modules that any file may use


TORCH = ("tensors/", "ranks/", "saving/", "loading/", "store/", "frontends/")
FENCES = (
    Fence(("torch",), TORCH, "list, gc and verify start without torch"),
    Fence(
        ("torch.distributed",),
        ("ranks/ranks.py",),
        "collectives have one home, with a twin for a single process",
        but=(
            "torch.distributed.ProcessGroup",  # a type
            "torch.distributed.device_mesh",  # types
            "torch.distributed.tensor",  # DTensor and its placements
            "torch.distributed._shard",  # torch's ShardedTensor
            "torch.distributed.fsdp",  # the wrappers, to recognize their parameters
            "torch.distributed.checkpoint",  # the protocol of DCP
        ),
    ),
    Fence(
        ("torch.distributed.fsdp", "torch.distributed.checkpoint"),
        ("frontends/",),
        "wrappers of models and other checkpointers are known to front ends only",
    ),
    Fence(
        ("fsspec", "s3fs", "aiobotocore", "botocore", "aiohttp"),
        ("storage/remote/",),
        "one adapter to remote storages, of a few modules",
    ),
    Fence(("sqlite_utils", "sqlite3"), ("repository/catalogue.py",), "the catalogue can be done without"),
    Fence(("blake3",), ("format/", "base/digest.py"), "the format has one hash"),
    Fence(("msgspec",), ("format/",), "one package encodes and decodes all stored bytes"),
    Fence(("backports", "compression"), ("format/encodings/parts.py",), "the format has one coder"),
    Fence(
        ("cryptography",),
        ("repository/signing_keys.py", "contents/signatures.py", "store/store.py"),
        "keys are read, and signatures checked, in one place; others name the type of a key",
    ),
    Fence(("functools.cached_property",), ("base/lazy.py",), "a forked child could wait for its lock forever"),
    Fence(("datetime.strptime", "datetime.datetime.strptime"), (), "a forked child could wait for its lock forever"),
    Fence(("starlette", "uvicorn"), ("frontends/serve/",), "one front end listens, and is an extra"),
    Fence(("click", "rich"), ("cli/",), "only the command line talks to a person"),
    Fence(("os.environ", "os.environb", "os.getenv", "os.putenv"), ("cli/",), "settings are arguments of the library"),
)

EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "ranks/ranks.py",
        "os.environ",
    ): "launchers set WORLD_SIZE and TORCHELASTIC_RUN_ID, and torch reads the others: none is a setting",
    (
        "repository/repository.py",
        "os.environ",
    ): "CASCKPT_CACHE_DIR, CASCKPT_CREATE and CASCKPT_USER are for programs too",
}
"""(module of the package, what it names although a fence is around it, or a layer is above it) -> why it must."""

IMPORTERS = {"import_module", "importlib.import_module", "__import__"}


@dataclass(frozen=True)
class Use:
    """A dotted name that a module imports or reaches through an import, with its line number."""

    name: str
    line: int


@cache
def uses(path: str, source: str) -> tuple[Use, ...]:
    """Return all dotted names in the source of ``path`` (relative to the package), also from local imports."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    found: list[Use] = []
    for node in ast.walk(tree):
        for local, name, line in _imported(path, node):
            if local:
                bound[local] = local if name.startswith(f"{local}.") else name  # "import a.b" binds a
            found.append(Use(name, line))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = _dotted(node).partition(".")
            if first in bound:
                found.append(Use(f"{bound[first]}.{rest}", node.lineno))
    return tuple(found)


def _imported(path: str, node: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield the (local name or "", dotted name, line) of each import in a node."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name, node.lineno
    elif isinstance(node, ast.ImportFrom):
        origin = _origin(path, node)
        for alias in node.names:
            yield alias.asname or alias.name, f"{origin}.{alias.name}", node.lineno
    elif isinstance(node, ast.Call) and _dotted(node.func) in IMPORTERS:
        argument = node.args[0] if node.args else None
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield "", argument.value, node.lineno


def _origin(path: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module in ``from ... import``."""
    if not node.level:
        return node.module or ""
    folders = ("casckpt", *path.split("/")[:-1])
    return ".".join((*folders[: len(folders) - node.level + 1], *([node.module] if node.module else [])))


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for such an expression, "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    inner = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def within(name: str, modules: tuple[str, ...]) -> bool:
    """Report whether ``name`` is one of the modules or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def violations(path: str, source: str) -> list[str]:
    """Return the forbidden names in the source of ``path``, which is relative to the package."""
    if path in FREE:
        return []
    layer = path.partition("/")[0].removesuffix(".py")
    if layer not in BELOW:
        return [f"{path}: belongs to no layer"]
    found = set()
    for use in uses(path, source):
        for why in () if _excepted(path, use) else (*_upward(layer, use), *_fenced(path, use)):
            found.add(f"{path}:{use.line}: names {use.name}: {why}")
    return sorted(found)


def _upward(layer: str, use: Use) -> Iterator[str]:
    names = use.name.split(".")
    if names[0] != "casckpt" or names[1:2] == ["__version__"] or names[1:2] == ["_version"]:
        return
    other = names[1] if len(names) > 1 else ""
    if other != layer and other not in BELOW[layer]:
        yield f"{layer} is not above it"


def _fenced(path: str, use: Use) -> Iterator[str]:
    for fence in FENCES:
        inside = within(use.name, fence.modules) and not within(use.name, fence.but)
        if inside and not path.startswith(fence.places):
            yield f"only in {', '.join(fence.places)}: {fence.why}"


def _excepted(path: str, use: Use) -> bool:
    return any(path == where and within(use.name, (name,)) for where, name in EXCEPTIONS)


def modules() -> list[str]:
    """Return all modules of the package, as paths relative to it."""
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


MOST = 20
"""The maximum number of modules in one folder: more than this is hard to take in at a glance."""


def test_modules_import_only_from_lower_layers() -> None:
    found = [one for path in modules() for one in violations(path, (PACKAGE / path).read_text())]
    assert not found, "\n".join(found)


def test_every_listed_exception_to_the_layers_is_still_needed() -> None:
    used = {(path, use.name) for path in modules() for use in uses(path, (PACKAGE / path).read_text())}
    needless = [
        pair for pair in EXCEPTIONS if not any(path == pair[0] and within(name, (pair[1],)) for path, name in used)
    ]
    assert needless == []


def imports() -> dict[str, set[str]]:
    """Map each module to the modules of the package that it imports, anywhere in its code."""
    paths = {
        ".".join(("casckpt", *path.removesuffix(".py").split("/"))): path for path in modules() if path not in FREE
    }
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        named = {use.name for use in uses(path, (PACKAGE / path).read_text())}
        parts = [name.split(".") for name in named]
        outer = {".".join(some[:count]) for some in parts for count in range(2, len(some) + 1)}
        found[module] = (outer & paths.keys()) - {module}
    return found


def circles(imported: dict[str, set[str]]) -> set[str]:
    """Return the modules that import each other in a cycle."""
    left = dict(imported)
    while ends := [module for module, others in left.items() if not others & left.keys()]:
        for module in ends:
            del left[module]
    return set(left)


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    assert circles(imports()) == set()


def test_an_import_cycle_is_detected() -> None:
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


def test_no_folder_of_the_package_has_too_many_modules() -> None:
    beside = Counter(path.rpartition("/")[0] for path in modules() if not path.endswith("__init__.py"))
    assert {folder: count for folder, count in beside.items() if count > MOST} == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("errors.py", "from casckpt.format.keys import check_tag"),
        ("format/keys.py", "from casckpt.storage.base import ListedObject"),
        ("storage/local/store.py", "import casckpt.format.keys"),
        ("plan/reads.py", "from casckpt.repository import commits"),
        ("plan/reads.py", "def late():\n    from casckpt.store.store import Store"),
        ("plan/reads.py", "from casckpt import open"),
        ("plan/reads.py", "import casckpt\ncasckpt.open('x')"),
        ("plan/reads.py", "from ..repository import commits"),
        ("plan/reads.py", "import importlib\nimportlib.import_module('casckpt.cli.main')"),
        ("upkeep/gc/gc.py", "from casckpt.tensors.values import Shard"),
        ("tensors/values.py", "from casckpt.contents.refs import resolve"),
        ("store/store.py", "from casckpt.frontends import dcp"),
        ("frontends/dcp.py", "from casckpt.cli.main import main"),
        ("surprise/new.py", ""),
        ("format/dtypes.py", "import torch"),
        ("upkeep/gc/gc.py", "def late():\n    import torch.nn as nn"),
        ("cli/main.py", "from torch import Tensor"),
        ("format/extents.py", "from functools import cached_property"),
        ("format/keys.py", "from datetime import datetime\ndatetime.strptime('x', '%Y')"),
        ("upkeep/gc/gc.py", "if TYPE_CHECKING:\n    import torch"),
        ("tensors/values.py", "import torch.distributed as dist"),
        ("tensors/values.py", "import torch\ntorch.distributed.all_reduce(x)"),
        ("tensors/values.py", "import torch as t\nt.distributed.all_reduce(x)"),
        ("frontends/dcp.py", "from torch.distributed import ProcessGroup, all_gather"),
        ("saving/save.py", "from torch import distributed"),
        ("saving/save.py", "from torch.distributed.fsdp import FSDPModule"),
        ("storage/local/store.py", "import fsspec"),
        ("upkeep/gc/gc.py", "from s3fs import S3FileSystem"),
        ("upkeep/gc/gc.py", "import sqlite3"),
        ("saving/save.py", "from blake3 import blake3"),
        ("history/commits.py", "import msgspec"),
        ("upkeep/copies/replication.py", "from cryptography.exceptions import InvalidSignature"),
        ("format/encodings/frames.py", "from backports import zstd"),
        ("storage/local/store.py", "import os\nos.environ['X']"),
        ("storage/local/store.py", "from os import getenv"),
        ("saving/save.py", "from rich import print"),
    ],
)
def test_a_forbidden_import_is_detected(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("format/keys.py", "from casckpt import errors\nfrom casckpt.format.names import TxId\nimport msgspec, blake3"),
        ("format/manifest.py", "from casckpt import __version__"),
        ("plan/reads.py", "from casckpt.format import extents\nfrom casckpt.base.units import parse"),
        ("repository/catalogue.py", "import sqlite3, sqlite_utils"),
        ("storage/remote/store.py", "import fsspec"),
        ("storage/local/store.py", "import os\nos.open('x', os.O_RDONLY)"),
        ("ranks/ranks.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("tensors/values.py", "import torch\nfrom torch.distributed.tensor import DTensor"),
        ("frontends/dcp.py", "from torch.distributed.checkpoint import SavePlanner"),
        ("store/store.py", "from torch.distributed import ProcessGroup"),
        ("cli/main.py", "import os\nos.environ\nfrom casckpt.frontends import convert"),
        ("__init__.py", "from casckpt.store.opening import open"),
        ("plan/reads.py", "torch = 1\ntorch.distributed.all_reduce"),
    ],
)
def test_an_import_from_a_lower_layer_is_accepted(path: str, source: str) -> None:
    assert violations(path, source) == []


CIRCLE = (
    "cli/",
    "frontends/trainer/",
    "frontends/lightning/",
    "frontends/follow.py",
    "frontends/transformers/",
    "frontends/torchtitan.py",
    "frontends/accelerate.py",
    "frontends/interchange/export.py",
    "frontends/interchange/safetensors/exporting.py",
    "frontends/serve/hub.py",
    "frontends/serve/app.py",
)
"""Users of `Store`: they see the store, its checkpoints, values and ranks, but nothing below these."""

SEEN = (
    *("casckpt.__version__", "casckpt._version", "casckpt.errors", "casckpt.base", "casckpt.cli", "casckpt.frontends"),
    *("casckpt.store", "casckpt.contents.checkpoint", "casckpt.ranks", "casckpt.tensors.values"),
    *(f"casckpt.plan.{name}" for name in ("difference", "retention")),
)
"""What users of `Store` may reference in the package."""


def beyond(path: str, source: str) -> set[tuple[str, str]]:
    """Return the (module, name) pairs with which a user of `Store` reaches beyond its public area."""
    names = {use.name for use in uses(path, source) if use.name.startswith("casckpt.")}
    return {(path, name) for name in names if path.startswith(CIRCLE) and not within(name, SEEN)}


def test_users_of_the_store_do_not_import_packages_below_it() -> None:
    assert {pair for path in modules() for pair in beyond(path, (PACKAGE / path).read_text())} == set()


def test_an_import_from_below_the_store_is_detected() -> None:
    source = "def late():\n    from casckpt.history.commits import list_commits\nfrom casckpt.store.store import Store"
    assert beyond("cli/main.py", source) == {("cli/main.py", "casckpt.history.commits.list_commits")}
    assert beyond("frontends/dcp/converters.py", source) == set()


def test_every_module_that_is_listed_as_a_user_of_the_store_exists() -> None:
    assert [place for place in CIRCLE if not any(path.startswith(place) for path in modules())] == []


OPEN = (
    *SEEN,
    *("casckpt.tensors", "casckpt.format", "casckpt.plan", "casckpt.storage", "casckpt.repository.repository"),
    *("casckpt.contents.contents", "casckpt.saving", "casckpt.loading.load.values_at"),
    "casckpt.loading.load.read_together",  # `unshard` reads on all ranks, but `Store.read` is local to one process
    "casckpt.loading.job_reads",  # DCP's own messages, not an exchange, decide which host reads which blob
    *(f"casckpt.loading.{name}" for name in ("options", "entry_reader", "regions", "fit", "unread")),
    *("casckpt.loading.tied_tensors", "casckpt.loading.update.Update", "casckpt.loading.comparison.holds"),
)
"""What front ends that handle tensors may reference: the parts of a save, the contents of a checkpoint and their
readers.

They do not see history, upkeep, other parts of contents and repository, or how a load works.
"""


def beyond_open(path: str, source: str) -> set[tuple[str, str]]:
    """Return the (module, name) pairs with which a front end that handles tensors reaches beyond `OPEN`."""
    if not path.startswith("frontends/") or path.startswith(CIRCLE):
        return set()
    names = {use.name for use in uses(path, source) if use.name.startswith("casckpt.")}
    return {(path, name) for name in names if not within(name, OPEN)}


def test_tensor_front_ends_use_only_contents_and_readers() -> None:
    assert {pair for path in modules() for pair in beyond_open(path, (PACKAGE / path).read_text())} == set()


def test_a_forbidden_import_by_a_tensor_front_end_is_detected() -> None:
    source = (
        "def late():\n    from casckpt.history.commits import list_commits\nfrom casckpt.format.keys import check_tag"
    )
    assert beyond_open("frontends/dcp/ids.py", source) == {
        ("frontends/dcp/ids.py", "casckpt.history.commits.list_commits")
    }
    assert beyond_open("cli/main.py", source) == set()


LATE = ("store/", "loading/options.py", "saving/options.py")
"""Modules of layers with torch that import it when a call needs tensors: `casckpt list` uses them."""


def test_modules_without_tensors_do_not_import_torch() -> None:
    free = [path for path in modules() if not path.startswith((*TORCH, "__main__")) or path.startswith(LATE)]
    names = [".".join(("casckpt", *path.removesuffix(".py").split("/"))).removesuffix(".__init__") for path in free]
    code = f"import sys\nfor name in {names}: __import__(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
