"""The shared part of tools/rename and tools/move: the project's files, and ty, which finds definitions."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "casckpt"
PLANTED = "tools/planted.py"
HISTORY = ("CHANGELOG.md",)
"""Pages in which names remain as they were when the page was written."""

Place: TypeAlias = tuple[str, int]
"""A file (relative to the root) and an offset in its text."""


class Refused(Exception):
    """The change would be incorrect. No files were written."""


class Source:
    """A text file. Offsets count characters; ty and `ast` count lines and bytes within a line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(found.end() for found in re.finditer("\n", text))]

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree of a Python file."""
        return ast.parse(self.text)

    def offset(self, line: int, byte: int) -> int:
        """Return the offset of a byte in a line; the first line is 1."""
        start = self.starts[line - 1]
        return start + len(self.text[start:].partition("\n")[0].encode()[:byte].decode())

    def position(self, offset: int) -> tuple[int, int]:
        """Return the line of an offset (the first is 1), and the byte offset in the line."""
        line = bisect_right(self.starts, offset)
        return line, len(self.text[self.starts[line - 1] : offset].encode())

    def line(self, offset: int) -> tuple[int, str]:
        """Return the number and the text of the line that contains an offset."""
        line = bisect_right(self.starts, offset)
        return line, self.text[self.starts[line - 1] :].partition("\n")[0]

    def span(self, node: Any) -> tuple[int, int]:
        """Return the offsets at which a node begins and ends."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def words(self, word: str) -> list[int]:
        """Return every offset at which ``word`` occurs as a whole word."""
        return [found.start() for found in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", self.text)]

    @cached_property
    def prose(self) -> list[tuple[int, int]]:
        """Return the start and end of the comments and strings of a Python file."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        kinds = {tokenize.COMMENT, tokenize.STRING}
        at = self.starts
        spans = [(one.type, at[one.start[0] - 1] + one.start[1], at[one.end[0] - 1] + one.end[1]) for one in tokens]
        return [(start, end) for kind, start, end in spans if kind in kinds]

    def prose_around(self, offset: int) -> str:
        """Return the comment or string around an offset, or "" for code."""
        index = bisect_right(self.prose, (offset, sys.maxsize)) - 1
        start, end = self.prose[index] if index >= 0 else (0, 0)
        return self.text[start:end] if start <= offset < end else ""


class Project:
    """The files that git tracks or would add, and their pending edits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.edits: dict[str, dict[tuple[int, int], str]] = {}

    @cached_property
    def files(self) -> list[str]:
        """Return the project's text files, relative to the root."""
        listed = self.git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        endings = {".py", ".md", ".toml", ".dot"}
        paths = [name for name in listed if Path(name).suffix in endings or name.startswith(("tools/", ".ci/"))]
        return [name for name in dict.fromkeys(paths) if (self.root / name).is_file() and name not in HISTORY]

    @property
    def python(self) -> list[str]:
        """Return the Python modules among the files."""
        return [name for name in self.files if name.endswith(".py")]

    def git(self, *arguments: str) -> str:
        """Return the output of a git command."""
        command = ["git", *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout

    @cache  # noqa: B019 - one project lives as long as the program
    def source(self, name: str) -> Source:
        """Return the contents of a file at the start of the command."""
        return Source((self.root / name).read_text())

    def with_word(self, word: str, names: Sequence[str]) -> list[str]:
        """Return the files that contain ``word``."""
        return [name for name in names if word in self.source(name).text]

    def module(self, dotted: str) -> str:
        """Return the file of a module or package, or "" if there is none. Modules in tools/ are not in a package."""
        path = dotted.replace(".", "/")
        tries = (f"{path}.py", f"{path}/__init__.py", f"tools/{path}.py")
        return next((name for name in tries if (self.root / name).is_file()), "")

    def replace(self, name: str, start: int, end: int, new: str) -> None:
        """Add an edit."""
        self.edits.setdefault(name, {})[start, end] = new

    def edited(self, name: str) -> str:
        """Return the text of a file with its edits."""
        text = self.source(name).text
        for (start, end), new in sorted(self.edits.get(name, {}).items(), reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def write(self) -> None:
        """Write all edits."""
        for name in self.edits:
            (self.root / name).write_text(self.edited(name))

    def show(self, name: str, offset: int) -> str:
        """Format a location for the report."""
        number, line = self.source(name).line(offset)
        return f"{name}:{number}: {line.strip()}"

    def tidy(self, names: Sequence[str], *, unused: bool = False) -> None:
        """Sort the imports of these files, and format them. Optionally remove unused imports."""
        python = [name for name in names if name.endswith(".py") and (self.root / name).is_file()]
        ruff = str(Path(sys.executable).with_name("ruff"))
        rules = "I,F401,F811" if unused else "I"
        for arguments in ("check", f"--select={rules}", "--fix", "-q"), ("format", "-q"):
            if python:
                subprocess.run([ruff, *arguments, *python], cwd=self.root, check=True)

    def planted_nowhere(self) -> list[str]:
        """Return the planted bugs whose text no longer occurs exactly once."""
        if not (self.root / PLANTED).exists():
            return []
        command = [sys.executable, "tools/_places.py"]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True).stdout.splitlines()


class Ty:
    """A server of ty (https://docs.astral.sh/ty) that finds definitions."""

    def __init__(self, project: Project) -> None:
        self.project, self._number, self._opened = project, 0, set[str]()
        beside = Path(sys.executable).with_name("ty")
        command = str(beside) if beside.exists() else shutil.which("ty")
        if not command:
            raise Refused("ty is not installed: run tools/setup, or put ty on the PATH (pip install ty)")
        self._process = subprocess.Popen(
            [command, "server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"VIRTUAL_ENV": sys.prefix},  # where the libraries are
        )
        self._write, self._read = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        root = project.root.as_uri()
        folders = [{"uri": root, "name": "project"}]
        capabilities = {"general": {"positionEncodings": ["utf-8"]}}
        self._ask(["initialize"], [{"processId": os.getpid(), "rootUri": root, "workspaceFolders": folders,
                                    "capabilities": capabilities}])  # fmt: skip
        self._send({"method": "initialized", "params": {}})

    def close(self) -> None:
        """Stop the server."""
        self._process.kill()
        self._process.communicate()

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message | {"jsonrpc": "2.0"}).encode()
        self._write.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self._write.flush()

    def _receive(self) -> dict[str, Any]:
        length = 0
        while (header := self._read.readline()) != b"\r\n":
            if not header:
                raise Refused("ty exited without an answer")
            if header.lower().startswith(b"content-length:"):
                length = int(header.split(b":")[1])
        return dict(json.loads(self._read.read(length)))

    def _ask(self, methods: Sequence[str], params: Sequence[Any]) -> list[Any]:
        """Send requests one at a time, so that no pipe fills up, and return the responses."""
        answers = []
        for method, given in zip(methods, params, strict=True):
            self._number += 1
            self._send({"id": self._number, "method": method, "params": given})
            while (got := self._receive()).get("id") != self._number or "method" in got:
                if "method" in got and "id" in got:  # a request from the server
                    self._send({"id": got["id"], "result": None})
            answers.append(got.get("result"))
        return answers

    def definitions(self, places: Sequence[Place]) -> dict[Place, set[Place]]:
        """Return the definitions of the names at these positions. Outside the project, the file is ""."""
        params = []
        for name, offset in places:
            uri = (self.project.root / name).as_uri()
            if name not in self._opened:
                text = self.project.source(name).text
                document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
                self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})
                self._opened.add(name)
            line, byte = self.project.source(name).position(offset)
            params.append({"textDocument": {"uri": uri}, "position": {"line": line - 1, "character": byte}})
        answers = self._ask(["textDocument/definition"] * len(params), params)
        return {
            place: {self._place(one) for one in answer or ()} for place, answer in zip(places, answers, strict=True)
        }

    def _place(self, found: dict[str, Any]) -> Place:
        uri = found.get("targetUri") or found["uri"]
        at = (found.get("targetSelectionRange") or found["range"])["start"]
        prefix = f"{self.project.root.as_uri()}/"
        name = uri.removeprefix(prefix)
        if not uri.startswith(prefix) or name.startswith(".venv") or not name.endswith(".py"):
            return "", 0
        return name, self.project.source(name).offset(at["line"] + 1, at["character"])


Scope: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements of a scope, including those in ``if``, ``try`` and ``with``, but not nested scopes."""
    for one in body:
        yield one
        if not isinstance(one, (*FUNCTIONS, ast.ClassDef)):
            inner = [getattr(one, field, []) for field in ("body", "orelse", "finalbody")]
            inner += [handler.body for handler in getattr(one, "handlers", [])]
            for part in inner:
                yield from statements(part)


def bindings(source: Source, scope: Scope, name: str) -> Iterator[int]:
    """Return the definitions of ``name`` in a module or class: classes, functions, variables, attributes of self."""
    for one in statements(scope.body):
        if isinstance(one, (*FUNCTIONS, ast.ClassDef)):
            if one.name == name:
                start = source.offset(one.lineno, one.col_offset)
                yield start + re.search(rf"\b(?:def|class)\s+(?={name}\b)", source.text[start:]).end()  # type: ignore[union-attr]
            if isinstance(scope, ast.ClassDef) and isinstance(one, FUNCTIONS):
                yield from _on_self(source, one, name)
        elif isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.With | ast.If):
            head: list[Any] = [getattr(one, field, None) for field in ("target", "test")]
            head += [*getattr(one, "targets", []), *getattr(one, "items", [])]
            for node in (inner for part in head if part for inner in ast.walk(part)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
                    yield source.span(node)[0]


def _on_self(source: Source, function: Any, name: str) -> Iterator[int]:
    first = next(iter(function.args.posonlyargs + function.args.args), None)
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=found, ctx=ast.Store()):
                if first and (owner, found) == (first.arg, name):
                    yield source.span(node)[1] - len(name)


def inner(scope: Scope, name: str) -> Scope | None:
    """Return the class or function with that name in a scope."""
    kinds = (*FUNCTIONS, ast.ClassDef)
    return next((one for one in statements(scope.body) if isinstance(one, kinds) and one.name == name), None)


def main(change: Callable[[Project, Sequence[str]], tuple[list[str], list[str]]]) -> None:
    """Run a command. Print its changes, and then the locations that a person must check."""
    project = Project(ROOT)
    try:
        done, doubtful = change(project, sys.argv[1:])
    except Refused as error:
        sys.exit(f"{Path(sys.argv[0]).stem.strip('_')}: {error}")
    print("\n".join(done))
    doubtful += project.planted_nowhere()
    if doubtful:
        print(f"\nCheck these by hand ({len(doubtful)}):")
        print("\n".join(doubtful))
