"""See tools/rename. ty resolves each occurrence in code. Unambiguous occurrences in text are also renamed."""

from __future__ import annotations

import argparse
import ast
import keyword
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from _refactor import FUNCTIONS, PACKAGE, PLANTED, Place, Project, Refused, Scope, Source, Ty, bindings, inner, main


@dataclass
class Renaming:
    """One change of a name.

    ``owner``: "" for a module-level name, the class for a member, or the function for a parameter.
    """

    project: Project
    ty: Ty
    old: str
    new: str
    home: str
    owner: str = ""
    parameter: bool = False
    family: set[Place] = field(default_factory=set)
    ours: set[Place] = field(default_factory=set)
    foreign: set[Place] = field(default_factory=set)
    unknown: set[Place] = field(default_factory=set)

    # code

    def sort_code(self) -> None:
        """Classify the occurrences in code.

        Each refers to this name, refers to a different one, or is unknown.
        """
        places = []
        for name in self.project.with_word(self.old, self.project.python):
            source = self.project.source(name)
            for offset in source.words(self.old) if name != PLANTED else ():
                text = source.prose_around(offset)
                if not text or (
                    not text.startswith("#") and "f" in text.partition(text.strip("rRbBfFuU")[0])[0].lower()
                ):
                    places.append((name, offset))
        for place, found in self.ty.definitions(places).items():
            source = self.project.source(place[0])
            if found & self.family or place in self.family:
                self.ours.add(place)
            elif found:
                self.foreign.add(place)
            elif not source.prose_around(place[1]) and self._could_mean_it(source, place[1]):
                self.unknown.add(place)

    def _could_mean_it(self, source: Source, offset: int) -> bool:
        """Return whether a name that ty cannot resolve could refer to this one."""
        attribute = source.text[:offset].rstrip().endswith(".")
        if self.parameter:
            return not attribute and re.match(r"\s*=[^=]", source.text[offset + len(self.old) :]) is not None
        return attribute or not self.owner

    def unique(self) -> bool:
        """Return whether the name has only one meaning in the package."""
        return not any(name.startswith(f"{PACKAGE}/") for name, _ in self.foreign | self.unknown)

    def check(self) -> None:
        """Reject a new name that is already in use or would hide a different one."""
        clashes = list[str]()
        for name in sorted({name for name, _ in self.ours}):
            source = self.project.source(name)
            for node in ast.walk(source.tree):
                if self.new in _bound(node, members=bool(self.owner) and not self.parameter):
                    clashes.append(self.project.show(name, source.span(node)[0]))
        if self.owner and not self.parameter:
            clashes = [one for one in clashes if self._in_family(one)]
        if clashes:
            raise Refused(f"{self.new} is taken:\n" + "\n".join(clashes))

    def _in_family(self, shown: str) -> bool:
        name, number = shown.split(":")[:2]
        tree = self.project.source(name).tree
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.lineno <= int(number) <= (node.end_lineno or 0):
                source = self.project.source(name)
                if any((name, at) in self.family for at in bindings(source, node, self.old)):
                    return True
        return False

    # text

    def sort_text(self) -> list[str]:
        """Edit the name in comments, docstrings, pages and planted bugs. Return the uncertain locations."""
        doubtful = [self.project.show(*place) for place in sorted(self.unknown)]
        strings = Counter[str]()
        unique, known = self.unique(), self.ours | self.foreign | self.unknown
        for name in self.project.with_word(self.old, self.project.files):
            if name == PLANTED:
                doubtful += self._planted(name)
                continue
            source = self.project.source(name)
            here, elsewhere = (any(place[0] == name for place in places) for places in (self.ours, self.foreign))
            for offset in source.words(self.old):
                if (name, offset) in known:
                    continue
                text = source.prose_around(offset) if name.endswith(".py") else "page"
                if not text:
                    continue  # code that cannot refer to it
                certain, meant = self._said(
                    source, name, offset, text, unique=(unique or (here and not self.owner)) and not elsewhere
                )
                if certain:
                    self._in_text(name, source, offset)
                elif text.strip("\"'") == self.old:
                    strings[name] += 1
                elif meant:
                    doubtful.append(self.project.show(name, offset))
        return [
            *dict.fromkeys(doubtful),
            *(f'{name}: "{self.old}" as a string, {n} times' for name, n in strings.items()),
        ]

    def _in_text(self, name: str, source: Source, offset: int) -> None:
        """Rename in text. Columns on a page keep their positions if there is room."""
        end, new = offset + len(self.old), self.new
        gap = re.match(r" {2,}(?=\S)", source.text[end:]) if name.endswith(".md") else None
        if gap:
            width = max(2, len(gap[0]) + len(self.old) - len(new))
            end, new = end + len(gap[0]), new + " " * width
        self.project.replace(name, offset, end, new)

    def _said(self, source: Source, name: str, offset: int, text: str, *, unique: bool) -> tuple[bool, bool]:
        """Return whether the text definitely refers to the name, and whether it possibly does."""
        before, after = source.text[:offset], source.text[offset + len(self.old) :]
        module = self.home.removesuffix("/__init__.py").removesuffix(".py")
        last = re.escape(self.owner.rpartition(".")[2] if self.owner else module.rpartition("/")[2])
        qualified = not self.parameter and re.search(rf"(?<!\w){last}\.$", before) is not None
        path = re.escape(module.removeprefix(f"{PACKAGE}/"))
        owner = f"{re.escape(self.owner)}\\." if self.owner else ""
        qualified |= re.search(rf"{path}(?:/__init__)?\.py::?{owner}$", before) is not None
        exact = re.fullmatch(r"""[rbfRBF]*(["'])(\w+)\1""", text)
        line, column = source.line(offset)[1], offset - source.starts[source.line(offset)[0] - 1]
        spans = re.finditer(r"`+([^`]+)`+", line)
        span = any(found.start() <= column < found.end() for found in spans)
        distinct = "_" in self.old.strip("_") or re.search(r"[a-z][A-Z]", self.old) is not None
        if name.endswith(".md") and before.count("\n```") % 2 == 1:  # in an example, a member looks like a member
            span = distinct or not self.owner or re.match(r"[=(]", after) is not None or before.endswith(".")
        if exact:  # the name of an attribute to patch, or a JSON key
            return unique and not self.owner and distinct, False
        if self._inside_owner(source, name, offset):
            return span or distinct, span
        if re.search(r"\w\.$", before) and not qualified:
            return False, span and not re.search(r"(?:torch|np|os|self)\.$", before)
        certain = qualified or (unique and (distinct or (span and not self.owner)))
        return certain, span or distinct or after.startswith("(")

    def _inside_owner(self, source: Source, name: str, offset: int) -> bool:
        """Return whether text in the class or function refers to that class's member or that function's parameter."""
        if name != self.home or not self.owner:
            return False
        scope = _scope(source.tree, self.owner.split("."))
        start, end = source.span(scope)
        return start <= offset < end

    def _planted(self, name: str) -> Iterator[str]:
        """Edit code in planted bugs, and the names of their functions, in the same way as the code itself."""
        source = self.project.source(name)
        nodes = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call | ast.Tuple))
        for node in nodes:
            parts = node.args if isinstance(node, ast.Call) else node.elts
            texts = [one for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if len(texts) >= 4 and any(re.search(rf"\b{self.old}\b", str(one.value)) for one in texts):
                files = {file for one in texts[-3:] for file in self._holds(str(one.value))}
                self._function(name, texts[-4], files)
                for one in texts[-3:]:
                    yield from self._quoted(name, one, files)

    def _function(self, name: str, node: ast.Constant, files: set[str]) -> None:
        """Return the qualified name of the function that contains a bug."""
        parts = str(node.value).split(".")
        owner = self.owner.split(".") if self.owner else []
        at = len(owner)
        if not self.parameter and parts[:at] == owner and parts[at : at + 1] == [self.old] and self.home in files:
            start, end = self.project.source(name).span(node)
            self.project.replace(name, start, end, f'"{".".join([*owner, self.new, *parts[at + 1 :]])}"')

    def _holds(self, text: str) -> list[str]:
        """Return the modules that contain a text if the text is long enough to identify code."""
        if not re.search(r"\W", text) or re.fullmatch(r"[\w/. ]+\.py", text):
            return []
        return [
            name for name in self.project.python if name.startswith(PACKAGE) and text in self.project.source(name).text
        ]

    def _quoted(self, name: str, node: ast.Constant, files: set[str]) -> Iterator[str]:
        source = self.project.source(name)
        start, end = source.span(node)
        ours, others = self._receivers(self.ours, files), self._receivers(self.foreign | self.unknown, files)
        for found in re.finditer(rf"(?<![\w.])((?:\w+\.)*){self.old}(?!\w)", source.text[start:end]):
            alone = found[1] not in others
            if alone and (found[1] in ours or (files and not others and self.unique())):
                self.project.replace(name, start + found.end(1), start + found.end(), self.new)
            elif not alone and found[1] in ours:
                yield self.project.show(name, start + found.start())

    def _receivers(self, places: set[Place], files: set[str]) -> set[str]:
        """Return the prefixes with which these files use the name, such as "self.", "one.", or none."""
        texts = [self.project.source(name).text[:offset] for name, offset in places if name in files]
        return {re.search(r"(?:\w+\.)*$", text[-99:])[0] for text in texts}  # type: ignore[index]


def _bound(node: ast.AST, *, members: bool) -> set[str]:
    """Return the names that a node binds or reads."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Name(id=name) | ast.arg(arg=name):
            return {name}
        case ast.Attribute(attr=name, ctx=ast.Store()) if members:
            return {name}
        case ast.alias(name=name, asname=asname) if not members:
            return {asname or name}
    return set()


def _scope(tree: ast.Module, path: Sequence[str]) -> Scope:
    scope: Scope = tree
    for part in path:
        found = inner(scope, part)
        if found is None:
            raise Refused(f"{'.'.join(path)} is not defined")
        scope = found
    return scope


class Families:
    """Related classes that have a member of the same name and must be renamed together."""

    def __init__(self, project: Project, ty: Ty, member: str) -> None:
        self.project, self.ty, self.member = project, ty, member
        self._classes = dict[Place, tuple[Source, ast.ClassDef]]()
        self._above = dict[Place, set[Place]]()
        self.beside = list[str]()  # classes that may satisfy a protocol without inheriting from it

    def classes(self, name: str) -> dict[Place, tuple[Source, ast.ClassDef]]:
        """Return the classes of a module by the position of their names."""
        source = self.project.source(name)
        nodes = (node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef))
        found = {}
        for node in nodes:
            start = source.span(node)[0]
            at = start + re.search(rf"\bclass\s+(?={node.name}\b)", source.text[start:]).end()  # type: ignore[union-attr]
            found[name, at] = source, node
        return found

    def above(self, place: Place, source: Source, node: ast.ClassDef) -> set[Place]:
        """Return all classes in the project from which a class inherits."""
        if place not in self._above:
            self._above[place] = set()
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            ends = [
                (place[0], source.span(base)[1] - 1) for base in bases if isinstance(base, ast.Name | ast.Attribute)
            ]
            for found in (one for answer in self.ty.definitions(ends).values() for one in answer if one[0]):
                here = self.classes(found[0]).get(found)
                if here:
                    self._above[place] |= {found, *self.above(found, *here)}
        return self._above[place]

    def of(self, owner: Place) -> dict[Place, tuple[Source, ast.ClassDef]]:
        """Return the classes that have the member and are related to the owner, including the owner."""
        names = self.project.with_word(self.member, self.project.python)
        classes = [(place, *one) for name in names for place, one in self.classes(name).items()]
        having = {
            place: (source, node)
            for place, source, node in classes
            if place == owner or any(True for _ in bindings(source, node, self.member))
        }
        above = {place: self.above(place, *one) for place, one in having.items()}
        found, more = set[Place](), {owner}
        while more:
            found |= more
            more = {one for one in having for other in found if one in above[other] or other in above[one]} - found
        bases = [ast.unparse(base) for base in having[owner][1].bases] if owner in having else []
        if any(base.startswith("Protocol") for base in bases):
            self.beside = [self.project.show(*place) for place in having.keys() - found]
        return {place: having[place] for place in found}


def _family(project: Project, ty: Ty, home: str, path: Sequence[str], parameter: str) -> tuple[set[Place], list[str]]:
    """Return the positions of the name's definitions, and the classes that may also need the change."""
    beside = list[str]()
    source = project.source(home)
    member = path[-1]
    if len(path) == 1:
        places = {(home, at) for at in bindings(source, source.tree, member)}
        functions = [(home, inner(source.tree, member))]
    else:
        scope = _scope(source.tree, path[:-1])
        families = Families(project, ty, member)
        owner = next(place for place, (_, node) in families.classes(home).items() if node is scope)
        related, beside = families.of(owner), families.beside
        places = {(name, at) for (name, _), (text, node) in related.items() for at in bindings(text, node, member)}
        functions = [(name, inner(node, member)) for (name, _), (_, node) in related.items()]
        _refuse_stored(scope)
    if not parameter:
        return places, beside
    found = set[Place]()
    for name, function in functions:
        arguments: Any = function.args if isinstance(function, FUNCTIONS) else None
        for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs] if arguments else ():
            if one.arg == parameter:
                found.add((name, project.source(name).span(one)[0]))
    return found, beside


def _refuse_stored(scope: Scope) -> None:
    bases = [ast.unparse(base) for base in scope.bases] if isinstance(scope, ast.ClassDef) else []
    if any("Struct" in base or "TypedDict" in base or base == "Record" for base in bases):
        raise Refused(f"{scope.name} is stored or appears in JSON: its fields are a contract")  # type: ignore[union-attr]


def rename(project: Project, old: str, new: str, *, doubtful: bool = False) -> tuple[list[str], list[str]]:
    """Rename in all files.

    Return the changes, and the locations to check. With ``doubtful``, also edit unresolved code.
    """
    dotted, _, parameter = old.partition(":")
    parts = dotted.split(".")
    count = next((count for count in range(len(parts) - 1, 0, -1) if project.module(".".join(parts[:count]))), 0)
    home, path = project.module(".".join(parts[:count])), parts[count:]
    if not count or not new.isidentifier() or keyword.iskeyword(new):
        raise Refused(f"{old} is not in a module of the project" if not count else f"{new!r} is not a name")
    owner = ".".join(path if parameter else path[:-1])
    ty = Ty(project)
    try:
        family, beside = _family(project, ty, home, path, parameter)
        if not family:
            raise Refused(f"{old} is not defined in {home}")
        change = Renaming(project, ty, parameter or path[-1], new, home, owner, bool(parameter), family)
        change.sort_code()
        change.check()
    finally:
        ty.close()
    if doubtful:
        change.ours |= change.unknown
        change.unknown = set()
    for name, offset in change.ours:
        project.replace(name, offset, offset + len(change.old), new)
    left = [*beside, *change.sort_text()]
    project.write()
    project.tidy(list(project.edits))
    edits = sum(len(one) for one in project.edits.values())
    return [f"{old} -> {new}: {edits} places in {len(project.edits)} files ({len(change.ours)} in code)"], left


def command(project: Project, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Parse the command line, and perform the rename."""
    parser = argparse.ArgumentParser(prog="tools/rename", description="Rename a name in code, tests, tools and docs.")
    parser.add_argument("old", help="package.module.name, package.module.Class.member, or function:parameter")
    parser.add_argument("new", help="only the new name")
    parser.add_argument("--doubtful", action="store_true", help="also rename matching code whose type is not known")
    asked = parser.parse_args(arguments)
    return rename(project, asked.old, asked.new, doubtful=asked.doubtful)


if __name__ == "__main__":
    main(command)
