"""tools/rename and tools/move, on a small project of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from _move import move
from _refactor import Project, Refused
from _rename import rename

FILES = {
    "casckpt/__init__.py": '"""A package."""\n',
    "casckpt/deep/__init__.py": '"""Deep."""\n',
    "casckpt/deep/parts.py": '''"""Parts."""

from __future__ import annotations

from dataclasses import dataclass

log = 1


@dataclass
class Part:
    """One. ``size``: its bytes."""

    size: int

    def grow_by(self, more: int) -> int:
        """Return ``more`` bytes than there are."""
        return self.size + more


class Small(Part):
    """A `Part` that grows less."""

    def grow_by(self, more: int) -> int:
        return super().grow_by(more) - 1


def make_part(size: int = 1) -> Part:
    """Make one."""
    return Part(size=size)
''',
    "casckpt/other.py": '''"""Another meaning of the name."""


class Part:
    """Not that one."""

    size = 0


def sizes(part: Part) -> int:
    """Its size."""
    return part.size
''',
    "casckpt/using.py": '''"""Uses."""

from casckpt.deep import parts
from casckpt.deep.parts import Part as P
from casckpt.deep.parts import make_part
from casckpt.other import Part

log = 1


def total(part: P, other: Part) -> str:
    """What ``make_part`` made, see casckpt/deep/parts.py."""
    sizes = [one.size for one in (make_part(size=3), parts.make_part())]
    return f"{part.size} {other.size} {part.grow_by(more=1)} {sizes}"
''',
    "tests/__init__.py": "",
    "tests/deep/__init__.py": "",
    "tests/deep/test_parts.py": """from typing import Any

from casckpt.deep.parts import Part


def test_it_grows(monkeypatch: Any, given: Any) -> None:
    monkeypatch.setattr("casckpt.deep.parts.make_part", None)
    assert Part(1).grow_by(2) == 3 == given.size
""",
    "docs/page.md": """# Page

`make_part` of `deep/parts.py`, and `Part`.

```
make_part    casckpt.deep.parts, that is parts.py
```
""",
    "CHANGELOG.md": "`make_part` in casckpt/deep/parts.py\n",
    "tools/planted.py": """PLANTED = (
    ("a name", "Part.grow_by", "self.size + more", "self.size", "tests/deep/test_parts.py"),
)
""",
    "tools/_places.py": "",
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return Project(tmp_path)


def text(project: Project, name: str) -> str:
    return (project.root / name).read_text()


def test_a_function_has_its_new_name_in_code_text_and_pages(project: Project) -> None:
    _, left = rename(project, "casckpt.deep.parts.make_part", "build")
    assert left == []
    used = text(project, "casckpt/using.py")
    assert "make_part" not in used
    assert "from casckpt.deep.parts import build\n" in used
    assert "(build(size=3), parts.build())" in used
    assert "What ``build`` made" in used
    assert '"casckpt.deep.parts.build"' in text(project, "tests/deep/test_parts.py")
    assert text(project, "docs/page.md").startswith("# Page\n\n`build` of `deep/parts.py`")
    assert "\nbuild        casckpt.deep" in text(project, "docs/page.md")
    assert text(project, "CHANGELOG.md") == FILES["CHANGELOG.md"]


def test_a_class_is_told_from_another_of_its_name_and_what_is_not_certain_is_reported(project: Project) -> None:
    _, left = rename(project, "casckpt.deep.parts.Part", "Piece")
    used = text(project, "casckpt/using.py")
    assert "import Piece as P\n" in used
    assert "from casckpt.other import Part\n" in used
    assert text(project, "casckpt/other.py") == FILES["casckpt/other.py"]
    assert "Small(Piece)" in text(project, "casckpt/deep/parts.py")
    assert '"Piece.grow_by"' in text(project, "tools/planted.py")
    assert "A `Piece` that grows less." in text(project, "casckpt/deep/parts.py")
    assert [one.partition(": ")[0] for one in left] == ["docs/page.md:3"]


def test_a_field_is_renamed_where_its_class_is_meant_and_unknown_objects_are_reported(project: Project) -> None:
    _, left = rename(project, "casckpt.deep.parts.Part.size", "length")
    assert "{part.length} {other.size}" in text(project, "casckpt/using.py")
    assert "[one.length for one in (make_part(size=3)" in text(project, "casckpt/using.py")
    parts = text(project, "casckpt/deep/parts.py")
    assert "One. ``length``: its bytes." in parts
    assert "Part(length=size)" in parts
    assert '"self.length + more",\n        "self.length",' in text(project, "tools/planted.py")
    assert [one.partition(": ")[0] for one in left] == ["tests/deep/test_parts.py:8"]


def test_objects_of_unknown_types_follow_if_that_is_asked_for(project: Project) -> None:
    _, left = rename(project, "casckpt.deep.parts.Part.size", "length", doubtful=True)
    assert "given.length" in text(project, "tests/deep/test_parts.py")
    assert left == []


def test_a_method_is_renamed_with_those_that_override_it(project: Project) -> None:
    rename(project, "casckpt.deep.parts.Part.grow_by", "grown")
    parts = text(project, "casckpt/deep/parts.py")
    assert parts.count("def grown(") == 2
    assert "super().grown(more)" in parts
    assert '"Part.grown"' in text(project, "tools/planted.py")


def test_a_parameter_is_renamed_with_the_keywords_of_calls(project: Project) -> None:
    rename(project, "casckpt.deep.parts.make_part:size", "length")
    assert "def make_part(length: int = 1)" in text(project, "casckpt/deep/parts.py")
    assert "return Part(size=length)" in text(project, "casckpt/deep/parts.py")
    assert "make_part(length=3)" in text(project, "casckpt/using.py")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("casckpt.deep.parts.make_part", "total", "using.py:11"),
        ("casckpt.deep.parts.Part.size", "grow_by", "is taken"),
        ("casckpt.deep.parts.make_part:more", "most", "not defined"),
        ("casckpt.deep.parts.Whole", "Half", "not defined"),
        ("casckpt.shallow.Part", "Piece", "not defined"),
        ("casckpt.deep.parts.Part", "class", "not a name"),
    ],
)
def test_a_name_that_is_taken_or_not_there_is_refused(project: Project, old: str, new: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        rename(project, old, new)
    assert text(project, "casckpt/deep/parts.py") == FILES["casckpt/deep/parts.py"]


def test_a_module_moves_with_its_tests_and_all_that_names_it(project: Project) -> None:
    rename(project, "casckpt.using.total", "total_size")
    done, left = move(Project(project.root), "casckpt.deep.parts", "casckpt.shallow.pieces")
    assert done[:2] == [
        "casckpt/deep/parts.py -> casckpt/shallow/pieces.py",
        "tests/deep/test_parts.py -> tests/shallow/test_pieces.py",
    ]
    assert left == ["casckpt/shallow/__init__.py: say what lies here", "tests/shallow/__init__.py: say what lies here"]
    used = text(project, "casckpt/using.py")
    assert "from casckpt.shallow import pieces\n" in used
    assert "pieces.make_part()" in used
    assert "see casckpt/shallow/pieces.py" in used
    assert "`shallow/pieces.py`" in text(project, "docs/page.md")
    assert "casckpt.shallow.pieces, that is pieces.py" in text(project, "docs/page.md")
    assert "tests/shallow/test_pieces.py" in text(project, "tools/planted.py")
    assert '"casckpt.shallow.pieces.make_part"' in text(project, "tests/shallow/test_pieces.py")


def test_a_package_moves_with_all_that_is_in_it(project: Project) -> None:
    move(project, "casckpt.deep", "casckpt.far.deeper")
    assert "from casckpt.far.deeper import parts\n" in text(project, "casckpt/using.py")
    assert "`far/deeper/parts.py`" in text(project, "docs/page.md")
    assert "from casckpt.far.deeper.parts import Part" in text(project, "tests/far/deeper/test_parts.py")


def test_a_module_is_taken_in_by_another(project: Project) -> None:
    (project.root / "casckpt/using.py").write_text(
        FILES["casckpt/using.py"].replace("import Part as P", "import Small")
    )
    with pytest.raises(Refused, match="both modules have Part:"):
        move(project, "casckpt.deep.parts", "casckpt.using")
    text_now = (
        FILES["casckpt/using.py"]
        .replace("import Part as P\n", "import Small as Small\n")
        .replace("part: P", "part: Small")
    )
    (project.root / "casckpt/using.py").write_text(text_now.replace("import Part\n", "import Part as Other\n"))
    done, _ = move(Project(project.root), "casckpt.deep.parts", "casckpt.using")
    assert done[0] == "casckpt/deep/parts.py -> casckpt/using.py (merged)"
    used = text(project, "casckpt/using.py")
    assert used.startswith('"""Uses."""\n\nfrom __future__ import annotations\n\nfrom dataclasses import dataclass\n')
    assert used.index("class Part:") < used.index("def total(")
    assert used.count("log = 1") == 1
    assert "from casckpt.deep" not in used
    assert "(make_part(size=3), make_part())" in used


def test_modules_that_both_have_a_name_are_not_made_one(project: Project) -> None:
    with pytest.raises(Refused, match="both modules have Part:"):
        move(project, "casckpt.deep.parts", "casckpt.other")
    assert (project.root / "casckpt/deep/parts.py").exists()


def test_a_circle_of_imports_and_fixtures_that_no_longer_reach_are_reported(project: Project) -> None:
    (project.root / "tests/deep/conftest.py").write_text("")
    (project.root / "casckpt/deep/parts.py").write_text("from casckpt.using import total\n\nPART = total\n")
    (project.root / "casckpt/using.py").write_text("from casckpt.deep.parts import PART\n\ntotal = PART\n")
    _, left = move(project, "casckpt.deep.parts", "casckpt.pieces")
    assert "tests/deep/conftest.py: its fixtures do not reach tests/test_pieces.py" in left
    assert any(one.startswith("import casckpt.pieces: ImportError") for one in left)
