"""Advice in messages: where casckpt gives advice, and which tests follow it.

A hint is a message, or a part of one, that names an argument, a command, an option, a setting or a call. `hints` finds
hints in the source. A test in `tests.hints` triggers a hint, does what it says, and checks the result::

    @follows("history/transactions.py:begin_save", "overwrite it")
    def test_the_suggested_option_overwrites_an_existing_step(store, messages):
        store.save({"x": 1}, run="a", step=1)
        with messages.error() as advice:  # the error of that function, with that text
            store.save({"x": 2}, run="a", step=1)
        store.save({"x": 2}, run="a", step=1, **advice.argument("overwrite"))
        assert store.load("a@1") == {"x": 2}
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import pytest

from casckpt.cli.main import command_modules

PACKAGE: Final = Path(__file__).resolve().parent.parent.parent / "casckpt"
HOLE: Final = "…"
"""Stands for a value in a hint's text."""

_COMMANDS: Final = "|".join(sorted(command_modules()))
_IDENTIFIER: Final = r"\b[a-z]+(?:_[a-z]+)+\b"
_ADVICE: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<![\w…{])[a-z_]{3,}=(?!=)",  # an argument
        rf"\bcasckpt (?:{_COMMANDS})\b",
        r"(?<!\w)--[a-z-]{3,}",
        r"\b[A-Z]{2,}_[A-Z_]+\b",  # environment variables
        r"\b[Ss]tore\.[a-z_]+",
        r"\bcasckpt\.(?!json)[A-Za-z_]+",
        r"\b[a-zA-Z_.]+[a-zA-Z]\([^)]*\)(?= |,|;|$)",  # a function call
        r"\b(?:give|pass|use|leave|call|say|put|choose|map|make|load|save|wrap)\b[^;:.]*" + _IDENTIFIER,
        r"\b(?:by|into|to|with) (?:[a-z_]+\.)+[a-z_]+\b",
        rf"\b(?:by|into|with) {_IDENTIFIER}",
        rf"{_IDENTIFIER} takes\b",
        r"\b(?:install|upgrade)\b",
        r"`cp [^`]+`",
        r"\bMove it from\b|\brepeat the copy\b|; load with …",
    )
)
_LOGS: Final = re.compile(r"(?:_?log\w*|warnings)\.(?:warn|warning|error)\b|warn_once\b")

Test = TypeVar("Test", bound=Callable[..., None])


class Hint(NamedTuple):
    """``where``: module and function, such as "store/store.py:Store.save".

    ``kind``: raise, log, or part of a message.
    """

    where: str
    text: str
    kind: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def hints() -> Iterator[Hint]:
    """Return all hints of casckpt."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield from hints_in(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))


def hints_in(module: str, source: str) -> Iterator[Hint]:
    """Return the hints of a module. `HOLE` replaces each value in a text. Nested texts follow in parentheses."""
    for statement, function in _statements(ast.parse(source), ()):
        kind = _kind(statement)
        where = f"{module}:{'.'.join(function)}"
        for text in _texts(statement):
            if is_advice(text):
                yield Hint(where, text, kind)


def is_advice(text: str) -> bool:
    """Report whether a message advises more than a different argument value (``jobs=0 is not valid: pass 1``)."""
    return " " in text and any(pattern.search(re.sub(r"^[a-z_]+=…", "", text)) for pattern in _ADVICE)


def _kind(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Raise):
        return "raise"
    return "log" if _LOGS.match(ast.unparse(statement)) else "part"


def _statements(node: ast.AST, function: tuple[str, ...]) -> Iterator[tuple[ast.stmt, tuple[str, ...]]]:
    """Return the innermost statements except docstrings, with their functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _statements(child, (*function, child.name))
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        elif isinstance(child, ast.stmt) and not any(
            isinstance(below, ast.stmt) for below in ast.walk(child) if below is not child
        ):
            yield child, function
        else:
            yield from _statements(child, function)


def _texts(node: ast.AST) -> Iterator[str]:
    """Return every text below a node, each as long as possible."""
    if _is_text(node):
        yield _text(node)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and _is_text(node):
        return _text(node.left) + _text(node.right)
    return HOLE + "".join(f"({text})" for text in _texts(node) if " " in text.strip(", "))


class Case(NamedTuple):
    """The hints that a test follows: the hints of ``where`` that contain ``text``."""

    where: str
    text: str

    def covers(self, hint: Hint) -> bool:
        """Report whether the case covers this hint."""
        return self.where == hint.where and self.text in hint.text

    @property
    def raises(self) -> bool:
        """Report whether its function raises the message itself."""
        return {hint.kind for hint in hints_of(self.where) if self.covers(hint)} == {"raise"}

    def in_message(self, message: str) -> bool:
        """Report whether a message contains the text, with values in place of its holes."""
        return bool(re.search(".*?".join(map(re.escape, re.split(r"…|%[srd]", self.text))), message, re.DOTALL))


def follows(where: str, text: str) -> Callable[[Test], Test]:
    """Mark a test that follows the hints of ``where`` (module:function) that contain ``text``."""

    def mark(test: Test) -> Test:
        vars(test).setdefault("follows", []).append(Case(where, text))
        return test

    return mark


class Advice:
    """A message that a test follows. Each method fails if the message lacks the requested part."""

    def __init__(self, message: str = "") -> None:
        self.message = message
        self.followed = False

    def says(self, text: str) -> str:
        """Return ``text``, which the message contains."""
        assert text in self.message, f"{text!r} is not in: {self.message}"
        self.followed = True
        return text

    def argument(self, name: str, after: str = "") -> dict[str, Any]:
        """Return ``{name: value}`` with the first value after ``name=`` that follows ``after`` in the message.

        Without ``after``, return the last value, because the first may be the wrong value that the message reports.
        """
        shown = self.message.partition(self.says(after))[2] if after else self.message
        self.says(f"{name}=")
        places = [found.end() for found in re.finditer(rf"\b{name}=", shown)]
        for place in places if after else reversed(places):
            for end in range(min(len(shown), place + 400), place, -1):
                try:
                    value = ast.literal_eval(shown[place:end])
                except (SyntaxError, ValueError):
                    continue
                if not shown[:end].rstrip().endswith(","):  # a comma would make it a tuple
                    return {name: value}
        raise AssertionError(f"no value is shown for {name}= in: {self.message}")

    def command(self, command: str, **words: object) -> list[str]:
        """Return the arguments of `` `casckpt COMMAND ...` `` in the message. ``words`` replaces placeholders."""
        found = re.search(rf"casckpt {command}\b([^`]*)`|casckpt {command}\b()", self.message)
        assert found, f"casckpt {command} is not in: {self.message}"
        self.followed = True
        return [command, *(str(words.get(word, word)) for word in (found[1] or "").split())]


class Messages:
    """The fixture ``messages``. It catches the messages that a test causes, and matches them to the test's cases."""

    def __init__(self, cases: Iterable[Case], caplog: pytest.LogCaptureFixture) -> None:
        self._cases = list(cases)
        self._caplog = caplog
        self._met = set[Case]()
        self._advice: list[Advice] = []

    @contextmanager
    def error(self, kind: type[BaseException] | tuple[type[BaseException], ...] | None = None) -> Iterator[Advice]:
        """Catch the block's error.

        It must contain the text of a case, and come from the case's function if that function raises it.
        """
        from casckpt.errors import CasckptError

        advice = Advice()
        with pytest.raises(kind or CasckptError) as caught:
            yield advice
        advice.message = str(caught.value)
        self._take(advice, set(_passed(caught.value)))

    @contextmanager
    def log(self, level: str = "WARNING") -> Iterator[Advice]:
        """Catch what the block logs, from ``level`` on."""
        advice = Advice()
        self._caplog.clear()
        with self._caplog.at_level(level):
            yield advice
        advice.message = "\n".join(record.getMessage() for record in self._caplog.records)
        self._take(advice)

    def text(self, message: object) -> Advice:
        """Accept a message that appeared elsewhere, for example on a rank or in a command's output."""
        advice = Advice(str(message))
        self._take(advice)
        return advice

    def check(self) -> None:
        """Fail if a case did not occur or if the test did not follow some advice."""
        assert self._met == set(self._cases), f"not met: {set(self._cases) - self._met}"
        assert all(advice.followed for advice in self._advice), [
            one.message for one in self._advice if not one.followed
        ]

    def _take(self, advice: Advice, passed: set[str] | None = None) -> None:
        """``passed``: the functions that the error passed through."""
        found = [case for case in self._cases if case.in_message(advice.message)]
        assert found, f"{[case.text for case in self._cases]}: not in: {advice.message}"
        met = [case for case in found if passed is None or not case.raises or case.where in passed]
        assert met, f"{[case.where for case in found]} did not raise: {advice.message}"
        self._met.update(met)
        self._advice.append(advice)


def hints_of(where: str) -> list[Hint]:
    module = where.partition(":")[0]
    source = (PACKAGE / module).read_text(encoding="utf-8")
    return [hint for hint in hints_in(module, source) if hint.where == where]


def _passed(error: BaseException | None) -> Iterator[str]:
    """Return the functions of casckpt that an error, or its causes, passed through."""
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if Path(code.co_filename).is_relative_to(PACKAGE):
                module = Path(code.co_filename).relative_to(PACKAGE).as_posix()
                yield f"{module}:{code.co_qualname.replace('.<locals>', '')}".replace(":<module>", ":")
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
