"""See tools/move. Text search finds paths and dotted names. ty finds modules that are imported by their last name."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from _refactor import FUNCTIONS, PACKAGE, Project, Refused, Source, Ty, main, statements


class Move:
    """A module (or package) that moves from one dotted name to another, or into an existing module."""

    def __init__(self, project: Project, old: str, new: str) -> None:
        self.project, self.old, self.new = project, old, new
        self.home = project.module(old)
        if not self.home or self.home.startswith("tools/"):
            raise Refused(f"there is no module {old}")
        self.package = self.home.endswith("/__init__.py")
        self.path = self.home.removesuffix("/__init__.py")
        folder = new.replace(".", "/")
        self.target = folder if self.package else f"{folder}.py"
        self.merges = bool(project.module(new))
        self.doubtful = list[str]()
        if self.merges and self.package:
            raise Refused(f"{new} already exists: merge its modules one at a time")

    # references

    def edit_names(self) -> None:
        """Change the references to the module in all files: dotted names, paths, and its imported last name."""
        for name in self.project.files:
            source = self.project.source(name)
            for pattern, put in self._patterns(name):
                for found in re.finditer(pattern, source.text):
                    self.project.replace(name, *found.span(), put)
        self._edit_imports()

    def _patterns(self, name: str) -> list[tuple[str, str]]:
        """Return the references to the module in a file, and their replacements."""
        end = r"(?=[/`\"'\s]|$)" if self.package else r"(?!\w)"
        pairs = [
            (rf"(?<![\w.]){re.escape(self.old)}(?!\w)", self.new),
            (rf"(?<![\w-]){re.escape(self.path)}{end}", self.target),
        ]
        short, put = (one.removeprefix(f"{PACKAGE}/") for one in (self.path, self.target))
        if self.path.startswith(f"{PACKAGE}/"):
            inside = "|".join(re.escape(one.name) for one in (self.project.root / self.path).glob("*")) or "$^"
            end = rf"(?=/(?:{inside})\b|/[\"'`])" if self.package else r"(?!\w)"
            if self.package or "/" in short:
                pairs.append((rf"(?<![\w/.-]){re.escape(short)}{end}", put))
        last, newer = Path(self.path).name, Path(self.target).name
        if not self.package and last != newer and sum(Path(one).name == last for one in self.project.files) == 1:
            pairs.append((rf"(?<![\w/.-]){re.escape(last)}(?!\w)", newer))
        return pairs

    def _edit_imports(self) -> None:
        """Change ``from package import module`` and the uses of that name."""
        above, _, last = self.old.rpartition(".")
        new_above, _, new_last = self.new.rpartition(".")
        uses = list[tuple[str, int]]()
        for name in self.project.with_word(last, self.project.python):
            source = self.project.source(name)
            for node in ast.walk(source.tree):
                if not isinstance(node, ast.ImportFrom) or node.module != above or node.level:
                    continue
                alias = next((one for one in node.names if one.name == last), None)
                if alias is None:
                    continue
                local = alias.asname
                if last != new_last and not local and _has(source, new_last):
                    local = last
                    self.doubtful.append(f"{self.project.show(name, source.span(node)[0])}: {new_last} is taken here")
                if (above, last) != (new_above, new_last):
                    line = f"from {new_above} import {new_last}"
                    self.split(name, source, node, alias, f"{line} as {local}" if local else line)
                if last != new_last and not local:
                    uses += [(name, at) for at in source.words(last)]
        self._rename_uses(uses, last, new_last)

    def split(self, name: str, source: Source, node: ast.ImportFrom, alias: ast.alias, line: str) -> None:
        """Move one of several imported names to a separate line."""
        start, end = source.span(node)
        indent = source.line(start)[1][: node.col_offset]
        rest = [ast.unparse(one) for one in node.names if one is not alias]
        text = f"from {node.module} import {', '.join(rest)}\n{indent}{line}" if rest else line
        if any(mark in source.text[start:end] for mark in ("#",)):
            raise Refused(f"an import has a comment: {self.project.show(name, start)}")
        self.project.edits[name] = {
            span: put for span, put in self.project.edits.get(name, {}).items() if not start <= span[0] < end
        }
        self.project.replace(name, start, end, text)

    def _rename_uses(self, uses: Sequence[tuple[str, int]], last: str, new_last: str) -> None:
        if not uses:
            return
        ty = Ty(self.project)
        try:
            found = ty.definitions(uses)
        finally:
            ty.close()
        for (name, at), places in found.items():
            inside = any(start <= at < end for start, end in self.project.edits.get(name, {}))
            if not inside and any(home == self.home and offset == 0 for home, offset in places):
                self.project.replace(name, at, at + len(last), new_last)

    # the move

    def tests(self) -> list[tuple[str, str]]:
        """Return the (from, to) paths of the tests at the mirrored path."""
        if not self.path.startswith(f"{PACKAGE}/"):
            return []
        old, new = (Path("tests", *Path(one).parts[1:]) for one in (self.path, self.target))
        if self.package:
            return [(str(old), str(new))] if (self.project.root / old).is_dir() else []
        found, modules = [], {one.stem for one in (self.project.root / self.path).parent.glob("*.py")}
        for one in sorted((self.project.root / old.parent).glob(f"test_{old.stem}*.py")):
            more = one.stem.removeprefix(f"test_{old.stem}")
            if not more or (more.startswith("_") and old.stem + more not in modules):
                found.append((str(old.parent / one.name), str(new.parent / f"test_{new.stem}{more}.py")))
        return found

    def carry_out(self) -> list[str]:
        """Move the file, or merge it. Return the new packages."""
        made = list[str]()
        folder = (self.project.root / self.target).parent
        while not (folder / "__init__.py").exists() and folder != self.project.root:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").write_text("" if "tests" in folder.parts else '"""Say what lies here."""\n')
            made.append(str((folder / "__init__.py").relative_to(self.project.root)))
            folder = folder.parent
        if made:
            self.project.git("add", "-N", *made)
        if self.merges:
            text = merged(
                (self.project.root / self.home).read_text(), (self.project.root / self.target).read_text(), self
            )
            (self.project.root / self.target).write_text(text)
            self.project.git("rm", "-q", "-f", self.home)
        else:
            self.project.git("mv", self.path, self.target)
        return made


def _has(source: Source, name: str) -> bool:
    """Return whether a module binds or reads this name."""
    nodes = (node for node in ast.walk(source.tree) if isinstance(node, ast.Name | ast.arg | ast.alias))
    return any(name in _names(node) for node in nodes)


def _names(node: ast.Name | ast.arg | ast.alias) -> set[str]:
    match node:
        case ast.Name(id=name) | ast.arg(arg=name):
            return {name}
        case ast.alias(name=name, asname=asname):
            return {asname or name.partition(".")[0]}


def defined(body: Sequence[ast.stmt]) -> dict[str, str]:
    """Map each name to the text of the statement that binds it.

    An imported name is mapped to the module that defines it.
    """
    found = dict[str, str]()
    for one in statements(body):
        if isinstance(one, ast.Import | ast.ImportFrom):
            origin = f"{one.module}." if isinstance(one, ast.ImportFrom) else ""
            found |= {
                alias.asname or alias.name.partition(".")[0]: f"import {origin}{alias.name}" for alias in one.names
            }
        elif isinstance(one, (*FUNCTIONS, ast.ClassDef)):
            found[one.name] = ast.unparse(one)
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            found |= {
                node.id: ast.unparse(one) for top in targets for node in ast.walk(top) if isinstance(node, ast.Name)
            }
    return found


def merged(source: str, target: str, move: Move) -> str:
    """Merge two modules.

    The result has the imports of both, then the target's definitions, and then the source's. If the target imports
    from the source, the source's definitions come first. Raises Refused if both define the same name.
    """
    (head, _, names, body), (other_head, other_docs, other_names, other) = (
        _parts(one, move) for one in (source, target)
    )
    clashes = [name for name in names.keys() & other_names.keys() if names[name] != other_names[name]]
    if clashes:
        raise Refused(f"both modules have {', '.join(sorted(clashes))}: rename one first")
    same = {line for line in body.splitlines() if line in other.splitlines() and re.match(r"\w+ = ", line)}
    body = "\n".join(line for line in body.splitlines() if line not in same)
    first = f"from {move.new} import" in target or f"from {move.old} import" in target
    code = f"{body}\n\n\n{other}" if first else f"{other}\n\n\n{body}"
    return f"{other_docs}\n\n{other_head}\n{head}\n\n{code.strip()}\n"


def _parts(text: str, move: Move) -> tuple[str, str, dict[str, str], str]:
    """Return the imports, the docstring, the bound names, and the rest of a module."""
    source = Source(text)
    imports, taken = list[str](), list[tuple[int, int]]()
    docs = ""
    inside = {(one.rpartition(".")[0], one.rpartition(".")[2]) for one in (move.old, move.new)}
    for number, one in enumerate(source.tree.body):
        start, end = source.span(one)
        if number == 0 and isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
            docs = text[start:end]
        elif isinstance(one, ast.ImportFrom) and one.module in {move.old, move.new}:
            if any(alias.asname and alias.asname != alias.name for alias in one.names):
                raise Refused(f"the two modules import each other by another name: {ast.unparse(one)}")
        elif isinstance(one, ast.ImportFrom) and len(one.names) == 1 and (one.module, one.names[0].name) in inside:
            name = one.names[0].asname or one.names[0].name
            after = re.sub(rf"(?<![\w.]){name}\.(?=\w)", "", text[end:])
            return _parts(text[:start] + after, move)
        elif isinstance(one, ast.Import | ast.ImportFrom):
            end = max(end, start + len(source.line(end)[1]) if one.lineno == one.end_lineno else end)
            imports.append(text[start:end])
        else:
            continue
        taken.append((start, end))
    kept = {
        name: said
        for name, said in defined(source.tree.body).items()
        if not said.startswith((f"import {move.old}.", f"import {move.new}."))
    }
    for start, end in reversed(taken):
        text = text[:start] + text[end:]
    return "\n".join(imports), docs, kept, text.strip()


def move(project: Project, old: str, new: str) -> tuple[list[str], list[str]]:
    """Move a module with its tests. Return the changes, and the locations that a person must check."""
    if not project.module(old) and project.module(old.rpartition(".")[0]) and project.module(new):
        return move_one(project, old, new)
    change = Move(project, old, new)
    if change.merges:  # refuse before any write
        merged(project.source(change.home).text, project.source(change.target).text, change)
    moves = [change]
    for test, to in change.tests():
        dotted = [one.removesuffix(".py").replace("/", ".") for one in (test, to)]
        tests = Move(project, *dotted)
        if tests.merges and not _fits(tests):  # it remains a separate file next to the existing one
            tests = Move(project, dotted[0], f"{dotted[1]}_{old.rpartition('.')[2]}")
        moves.append(tests)
    for one in moves:
        one.edit_names()
    project.write()
    made = [name for one in moves for name in one.carry_out()]
    changed = {name: name for name in project.edits}
    for one in moves:
        changed = {name: re.sub(rf"^{re.escape(one.path)}(?=/|$)", one.target, now) for name, now in changed.items()}
    project.tidy([*changed.values(), *(one.target for one in moves if not one.package), *made])
    done = [f"{one.path} -> {one.target}{' (merged)' if one.merges else ''}" for one in moves]
    left = [f"{name}: say what lies here" for name in made]
    for one in moves:
        left += [*one.doubtful, *_fixtures(one), *_not_imported(project, one.new)]
    return [*done, f"{len(project.edits)} files edited"], [*left, *_left(change)]


def _fits(change: Move) -> bool:
    """Return whether the two modules can be merged."""
    try:
        return bool(merged(change.project.source(change.home).text, change.project.source(change.target).text, change))
    except Refused:
        return False


def move_one(project: Project, old: str, new: str) -> tuple[list[str], list[str]]:
    """Move one function, class or constant into a different, existing module."""
    (module, _, name), target = old.rpartition("."), project.module(new)
    home = project.module(module)
    source, other = project.source(home), project.source(target)
    if name not in defined(source.tree.body) or name in defined(other.tree.body):
        raise Refused(f"{name} is not defined in {home}, or {target} has a {name}")
    for file in project.with_word(name, [one for one in project.python if one not in (home, target)]):
        text = project.source(file)
        for node in ast.walk(text.tree):
            if not isinstance(node, ast.ImportFrom) or node.module != module:
                continue
            found = [one for one in node.names if one.name == name]
            if found:
                local = f" as {found[0].asname}" if found[0].asname else ""
                Move(project, module, new).split(file, text, node, found[0], f"from {new} import {name}{local}")
    paths = [one.removeprefix(f"{PACKAGE}/") for one in (home, target)]
    for file in project.files:
        for before, after in ((old, f"{new}.{name}"), *([(f"{one}:{name}", f"{two}:{name}") for one, two in [paths]])):
            for place in re.finditer(rf"(?<![\w./]){re.escape(before)}(?!\w)", project.source(file).text):
                project.replace(file, *place.span(), after)
    taken = _cut(source, name)
    names = defined(source.tree.body)
    rest = source.text[: taken[0]].rstrip() + "\n\n\n" + source.text[taken[1] :].lstrip()
    body = source.text[slice(*taken)].strip()
    needed = {one: said for one, said in names.items() if one != name and re.search(rf"\b{one}\b", body)}
    back = [one for one, said in needed.items() if not said.startswith("import ")]
    there = defined(other.tree.body)
    clashes = [one for one, said in needed.items() if there.get(one, said) not in (said, f"import {module}.{one}")]
    if clashes:
        raise Refused(f"{target} has another {', '.join(clashes)}, which {name} needs")
    imports = [
        source.text[slice(*source.span(one))]
        for one in source.tree.body
        if isinstance(one, ast.Import | ast.ImportFrom) and getattr(one, "module", None) != new
    ]
    lines = [*imports, *(f"from {module} import {one}" for one in back)]
    project.write()
    (project.root / home).write_text(_below_docs(rest, [f"from {new} import {name}"]))
    (project.root / target).write_text(_below_docs(other.text.rstrip() + f"\n\n\n{body}\n", lines))
    project.tidy([home, target], unused=True)
    project.tidy(list(project.edits))
    left = [f"{target} imports {', '.join(back)} of {module}"] if back else []
    use = f"{module.rpartition('.')[2]}.{name}"
    uses = re.compile(rf"\b{re.escape(use)}\b")
    left += [f"{file}: still has {use}" for file in project.files if uses.search(project.edited(file))]
    return [f"{name}: {home} -> {target}", f"{len(project.edits)} files edited"], [*left, *_not_imported(project, new)]


def _cut(source: Source, name: str) -> tuple[int, int]:
    """Return the start and end of a definition, with its decorators, the comments above it, and a string below it."""
    body = source.tree.body
    at = next(number for number, one in enumerate(body) if name in defined([one]))
    node, below = body[at], body[at + 1] if at + 1 < len(body) else None
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    while source.text[source.starts[first - 2] :].startswith("#"):
        first -= 1
    text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    return source.starts[first - 1], source.span(below if text else node)[1]


def _below_docs(text: str, lines: Sequence[str]) -> str:
    """Add imports to a module."""
    tree = ast.parse(text)
    at = 1 if ast.get_docstring(tree) else 0
    while isinstance(tree.body[at], ast.ImportFrom) and tree.body[at].module == "__future__":  # type: ignore[attr-defined]
        at += 1
    start = Source(text).span(tree.body[at])[0]
    lines = [line for line in lines if "__future__" not in line]
    return text[:start] + "\n".join(lines) + "\n" + text[start:]


def _fixtures(change: Move) -> list[str]:
    """Return the fixtures that moved tests can no longer use."""
    reached = Path(change.target).parents
    lost = [
        one
        for one in Path(change.path).parents
        if one not in reached and (change.project.root / one / "conftest.py").exists()
    ]
    return [f"{one}/conftest.py: its fixtures do not reach {change.target}" for one in lost]


def _not_imported(project: Project, module: str) -> list[str]:
    """If a cycle or a missing name prevents importing the moved module, return Python's error."""
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, cwd=project.root, capture_output=True, text=True, check=False)
    return [f"import {module}: {done.stderr.strip().splitlines()[-1]}"] if done.returncode else []


def _left(change: Move) -> list[str]:
    """Return the texts that may still refer to the module by the end of its path."""
    parts = change.old.split(".")[-2:]
    word, ending = r"[./]".join(map(re.escape, parts)), r"\b" if change.package else r"(?:\.py)?\b(?!\.py)"
    alone = rf"|(?<![\w/.-]){re.escape(parts[-1])}\.py\b" if not change.package else rf"|`{re.escape(parts[-1])}/?`"
    found = list[str]()
    for name in Project(change.project.root).files:
        text = (change.project.root / name).read_text()
        lines = enumerate(text.splitlines(), 1)
        found += [
            f"{name}:{number}: {line.strip()}" for number, line in lines if re.search(rf"\b{word}{ending}{alone}", line)
        ]
    return found


def command(project: Project, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Parse the command line, and perform the move."""
    parser = argparse.ArgumentParser(prog="tools/move", description="Move a module or package, with its tests.")
    parser.add_argument("old", help="the dotted name of the module or package, or of one definition in a module")
    parser.add_argument("new", help="its new name; if that module exists, the two are merged")
    asked = parser.parse_args(arguments)
    return move(project, asked.old, asked.new)


if __name__ == "__main__":
    main(command)
