"""Runs the Python blocks and console commands of a documentation page in order.

The test runs exactly what a reader sees. A page's blocks share one folder, and its Python blocks share one namespace.

- ``python``: runs in this process. After a line ``<!-- ranks: 2 -->``, the block runs on that many ranks of a process
  group instead, independently of other blocks.
- After a line ``<!-- needs: lightning -->``, a block needs that package. `Reader.follow` runs it if asked to.
- ``console``: each line that begins with ``$ `` is a command that must succeed. The following lines are its output.
  ``...`` matches any text within a line, or any number of lines if it is alone in its line. If a command has no output
  lines, its output is not compared.
- ``crontab``: five time fields, then a command. "/data/" stands for the page's folder.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from casckpt.cli.main import cli

OnRanks = Callable[[int, "Block"], object]

_KINDS = "python|console|crontab"
_MARK = r"<!-- (?:ranks: (?P<ranks>\d+)|needs: (?P<needs>\w+)) -->\n"
_FENCE = re.compile(rf"^(?:{_MARK})?```(?P<kind>{_KINDS})\n(?P<text>.*?)^```$", re.M | re.S)
_SHELL = frozenset("|&;<>$`*\\~")
_QUOTED = re.compile(r"""'[^']*'|"[^"$`]*\"""")  # containing nothing special to a shell
_OR_STATUS = ' || echo "exit status $?"'


@dataclass(frozen=True)
class Block:
    """A block of a page. ``line``: where ``text`` begins. ``ranks``: 0 for a single process. ``needs``: a package."""

    page: str
    line: int
    kind: str
    text: str
    ranks: int
    needs: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run_python(self, namespace: dict[str, Any]) -> None:
        """Run the block as Python. Tracebacks name the line of the page."""
        source = "\n" * (self.line - 1) + self.text
        exec(compile(source, self.page, "exec", dont_inherit=True), namespace)


def blocks(path: Path) -> list[Block]:
    """Return all blocks of a page that a test can run."""
    text = path.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("text")) + 1
        found.append(
            Block(path.name, line, fence["kind"], fence["text"], int(fence["ranks"] or 0), fence["needs"] or "")
        )
    return found


@dataclass
class Reader:
    """Runs all commands of a page. ``given``: names that are defined before the first Python block."""

    folder: Path
    root: Path
    given: dict[str, Any]
    on_ranks: OnRanks

    def follow(self, page: Path, needs: str = "") -> int:
        """Run all blocks, and return their number.

        ``needs``: run only the first block and those that need this package.
        """
        run = {"python": self._python, "console": self._console, "crontab": self._crontab}
        every = blocks(page)
        todo = [*every[: bool(needs)], *(block for block in every if block.needs == needs)]
        with chdir(self.folder):
            for block in todo:
                run[block.kind](block)
        return len(todo)

    def _python(self, block: Block) -> None:
        if block.ranks:
            self.on_ranks(block.ranks, block)
        else:
            block.run_python(self.given)

    def _console(self, block: Block) -> None:
        for line, command, expected in _commands(block):
            status, printed = self._run(command)
            where = f"{block.page}:{line}: {command}"
            assert status == 0, f"{where}\nleft with {status}:\n{printed}"
            fits = re.fullmatch(pattern(expected), printed.strip())
            assert not expected or fits, f"{where}\nprinted\n{printed}\nbut the page says\n" + "\n".join(expected)

    def _crontab(self, block: Block) -> None:
        for line in block.text.splitlines():
            command = line.split(maxsplit=5)[5]
            status, printed = self._run(command.replace("/data/", f"{self.folder}/"))
            assert status == 0, f"{block}: {line}\nleft with {status}:\n{printed}"

    def _run(self, command: str) -> tuple[int, str]:
        """Return (exit status, output)."""
        words = shlex.split(command, comments=True)
        if words[0].startswith("tools/"):  # too slow for a test
            tool = self.root / words[0]
            return (0, "") if os.access(tool, os.X_OK) else (1, f"{tool} cannot be run")
        alone = command.removesuffix(_OR_STATUS)
        if words[0] != "casckpt" or _SHELL & set(_QUOTED.sub("", alone)):
            return self._in_a_shell(command)
        done = CliRunner().invoke(cli, shlex.split(alone, comments=True)[1:])
        if alone != command and done.exit_code:
            return 0, f"{done.output}exit status {done.exit_code}\n"
        return done.exit_code, done.output

    def _in_a_shell(self, command: str) -> tuple[int, str]:
        tools = self.folder.parent / "bin"
        tools.mkdir(exist_ok=True)
        for name, how in (("casckpt", " -m casckpt"), ("python", "")):
            if not (tools / name).exists():  # otherwise a server that an earlier command started may be executing it
                (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{how} "$@"\n')
                (tools / name).chmod(0o755)
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout


def _commands(block: Block) -> Iterator[tuple[int, str, list[str]]]:
    """Return (line number in the page, command, expected output lines) for each command."""
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(block.text.splitlines(), block.line):
        if line.startswith("$ "):
            found.append((number, line.removeprefix("$ "), []))
        elif found and line.startswith("> "):
            at, command, expected = found[-1]
            found[-1] = (at, f"{command}\n{line.removeprefix('> ')}", expected)
        else:
            assert found, f"{block}: a console block begins with a command, after '$ '"
            found[-1][2].append(line)
    yield from found


def commands_of(program: Path) -> list[tuple[str, list[str]]]:
    """Return the commands in a program's docstring, each with its output."""
    paragraphs = program.read_text().split('"""')[1].split("\n\n")
    return [one for text in paragraphs if text.startswith("$ ") for one in commands_in(text)]


def commands_in(text: str) -> list[tuple[str, list[str]]]:
    """Return (command, output lines) for each command in console blocks."""
    return [(command, expected) for _, command, expected in _commands(Block("", 1, "console", text, 0))]


def blocks_below(page: Path, heading: str, kind: str) -> list[str]:
    """Return the text of each block of a kind, such as "bash", between a heading and the next one."""
    found = re.search(rf"^##+ {heading}\n(.*?)(?=^##|\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page.name} has no heading {heading}"
    return re.findall(rf"^```{kind}\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)


def pattern(expected: list[str]) -> str:
    """Return a regular expression for lines that may contain ``...``."""
    lines = [r".*" if line == "..." else re.escape(line.rstrip()).replace(r"\.\.\.", "[^\n]*") for line in expected]
    return "(?s:" + r"[ ]*\n".join(lines).strip() + ")"


if __name__ == "__main__":
    alone = Reader(Path.cwd(), Path(__file__).resolve().parents[2], {}, lambda size, block: None)
    alone.follow(Path(sys.argv[1]), sys.argv[2])
