"""casckpt does not run code from data without ``allow_pickle=True``. The tests check the source.

They find functions that may run code by their names. Each use must check ``allow_pickle`` itself or appear here with
its reason. tests/frontends/test_hostile_imports.py and tests/tensors/test_untrusted.py check that a pickle cannot call
the functions that it names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "casckpt"
RUNNING = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "torch.load", "eval", "exec", "compile",
    "__import__", "importlib.import_module", "runpy.run_path", "runpy.run_module", "marshal.load", "marshal.loads",
    "shelve.open", "os.system", "os.popen", "numpy.load", "yaml.load", "yaml.unsafe_load", "dill.loads", "joblib.load",
    "cloudpickle.loads", "torch.jit.load", "torch.hub.load", "pydoc.locate", "pkgutil.resolve_name", "ctypes.CDLL",
    "torch.serialization.load", "torch.package.PackageImporter", "shutil.unpack_archive",
    "casckpt.tensors.untrusted.BoundedUnpickler", "casckpt.frontends.dcp.folder.read_metadata", "_run_pickle",
}  # fmt: skip
"""Full names of functions that may run what they are passed. The last three are our own."""

_TABLE = "its names stand in the code"
_CALLER = "whoever calls it has asked"
_RANK = "from a rank of the same job, which runs the same code"
KNOWN = {
    ("__init__.py", "", "importlib.import_module"): _TABLE,
    ("__init__.py", "__getattr__", "importlib.import_module"): _TABLE,
    ("cli/main.py", "get_command", "importlib.import_module"): _TABLE,
    ("frontends/megatron/__init__.py", "__getattr__", "importlib.import_module"): _TABLE,
    ("frontends/megatron/training_loop.py", "", "importlib.import_module"): _TABLE,
    ("tensors/kinds.py", "_of_torchao", "importlib.import_module"): _TABLE,
    ("frontends/interchange/torch_files.py", "_unmapper", "ctypes.CDLL"): "this process itself",
    ("storage/local/reader.py", "", "ctypes.CDLL"): "this process itself",
    ("storage/local/syscalls.py", "", "ctypes.CDLL"): "this process itself",
    ("ranks/wire.py", "unpack", "pickle.loads"): _RANK,
    ("ranks/messages.py", "portable", "pickle.loads"): "what it has pickled just now",
    ("frontends/megatron/saving.py", "_warn_of_differences", "pickle.loads"): _RANK,
    (
        "frontends/dcp/folder.py",
        "read_metadata",
        "casckpt.tensors.untrusted.BoundedUnpickler",
    ): _CALLER,
    ("frontends/files/cutting.py", "_Storages", "casckpt.tensors.untrusted.BoundedUnpickler"): "it finds no names",
    ("frontends/files/importing.py", "_archives", "casckpt.frontends.dcp.folder.read_metadata"): "anything=False",
    ("tensors/objects.py", "_run_pickle", "pickle.loads"): _CALLER,
    ("tensors/objects.py", "_run_pickle", "torch.load"): _CALLER,
    ("tensors/untrusted.py", "", "pickle._Unpickler"): "its table of functions is copied",
    ("tensors/untrusted.py", "BoundedUnpickler", "pickle._Unpickler"): "it finds the names that it is given alone",
}
"""(module, function or class, what it names) -> why it is safe."""

Place = tuple[str, str]
"""(function or class, what it names)."""


def test_calls_that_may_run_code_check_allow_pickle_or_are_listed() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert {(name, *place) for name, source in sources.items() for place in unguarded(source)} == set(KNOWN)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')", "from pickle import loads as x\nx(b'')", "import torch\ntorch.load('a')",
        "import torch as t\nt.load('a', weights_only=False)", "import torch\nread = torch.load", "eval('1')",
        "import torch\ntorch.load('a', weights_only=not trusted)", "import yaml\nyaml.load('a')",
        "import pickle\nclass Mine(pickle.Unpickler): pass", "import subprocess\nsubprocess.run('x', shell=True)",
        "import pickle\nif not allow_pickle:\n    pickle.loads(b'')", "import numpy as np\nnp.load('a')",
        "import pickle\nif allow_pickle:\n    pass\nelse:\n    pickle.loads(b'')",
        "import numpy as np\nnp.load('a', allow_pickle=True)",
    ],
)  # fmt: skip
def test_an_unchecked_call_is_detected(source: str) -> None:
    assert list(unguarded(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('a', weights_only=True)", "import pickle\npickle.dumps(1)",
        "import re\nre.compile('a')",
        "import torch\ntorch.load('a', weights_only=not allow_pickle)", "import json\njson.loads('1')",
        "import torch\ntorch.load('a', weights_only=not self._allow_pickle)",
        "import pickle\nif allow_pickle:\n    pickle.loads(b'')", "from casckpt.format import eval\neval('1')",
    ],
)  # fmt: skip
def test_a_checked_call_is_accepted(source: str) -> None:
    assert list(unguarded(source)) == []


def unguarded(source: str) -> Iterator[Place]:
    """Yield each use of `RUNNING` or of a shell that does not check allow_pickle."""
    tree = ast.parse(source)
    names, asking = _imported(tree), {id(node) for node in _asking(tree)}
    holders = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in ast.walk(tree):
        name = _named(node, names)
        if name is not None and id(node) not in asking:
            inside = [one for one in holders if one.lineno <= node.lineno <= (one.end_lineno or 0)]  # type: ignore[attr-defined]  # an expression
            yield max(inside, key=lambda one: one.lineno).name if inside else "", name


def _named(node: ast.AST, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Call) and any(one.arg == "shell" for one in node.keywords):
        return "shell"
    first, dot, rest = _dotted(node).partition(".")
    name = names.get(first, first) + dot + rest
    return name if name in RUNNING else None


def _asking(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield code under ``if allow_pickle``, and functions whose arguments keep them from running code without it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "allow_pickle":
            yield from (inner for line in node.body for inner in ast.walk(line))
        elif isinstance(node, ast.Call):
            said = {one.arg: ast.unparse(one.value) for one in node.keywords}
            safely = said.get("weights_only") in ("True", "not allow_pickle", "not self._allow_pickle")
            if safely or said.get("anything") == "allow_pickle":
                yield node.func


def _imported(tree: ast.AST) -> dict[str, str]:
    """Map the local names of a module's imports to full names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({one.asname: one.name for one in node.names if one.asname})
        elif isinstance(node, ast.ImportFrom):
            found.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
    return found


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    inner = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""
