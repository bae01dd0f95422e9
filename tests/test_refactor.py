"""tools/rename and tools/move on a small project."""

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
    "casckpt/deep/wheels.py": '''"""Wheels."""

from __future__ import annotations

from dataclasses import dataclass

log = 1


@dataclass
class Wheel:
    """One. ``spokes``: how many it has."""

    spokes: int

    def turn_by(self, more: int) -> int:
        """Return ``more`` bytes than there are."""
        return self.spokes + more


class Small(Wheel):
    """A `Wheel` that grows less."""

    def turn_by(self, more: int) -> int:
        return super().turn_by(more) - 1


def make_wheel(spokes: int = 1) -> Wheel:
    """Make one."""
    return Wheel(spokes=spokes)
''',
    "casckpt/other.py": '''"""Another meaning of the name."""


class Wheel:
    """Not that one."""

    spokes = 0


def counts(wheel: Wheel) -> int:
    """How many it has."""
    return wheel.spokes
''',
    "casckpt/using.py": '''"""Uses."""

from casckpt.deep import wheels
from casckpt.deep.wheels import Wheel as P
from casckpt.deep.wheels import make_wheel
from casckpt.other import Wheel

log = 1


def total(wheel: P, other: Wheel) -> str:
    """What ``make_wheel`` made, see casckpt/deep/wheels.py."""
    counts = [one.spokes for one in (make_wheel(spokes=3), wheels.make_wheel())]
    return f"{wheel.spokes} {other.spokes} {wheel.turn_by(more=1)} {counts}"
''',
    "tests/__init__.py": "",
    "tests/deep/__init__.py": "",
    "tests/deep/test_wheels.py": """from typing import Any

from casckpt.deep.wheels import Wheel


def test_it_grows(monkeypatch: Any, given: Any) -> None:
    monkeypatch.setattr("casckpt.deep.wheels.make_wheel", None)
    assert Wheel(1).turn_by(2) == 3 == given.spokes
""",
    "docs/page.md": """# Page

`make_wheel` of `deep/wheels.py`, and `Wheel`.

```
make_wheel    casckpt.deep.wheels, that is wheels.py
```
""",
    "CHANGELOG.md": "`make_wheel` in casckpt/deep/wheels.py\n",
    "tools/planted.py": """BUGS = {
    "a name": ("Wheel.turn_by", "self.spokes + more", "self.spokes", "tests/deep/test_wheels.py"),
}
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


def test_a_renamed_function_is_renamed_in_code_comments_and_pages(project: Project) -> None:
    _, left = rename(project, "casckpt.deep.wheels.make_wheel", "build")
    assert left == []
    used = text(project, "casckpt/using.py")
    assert "make_wheel" not in used
    assert "from casckpt.deep.wheels import build\n" in used
    assert "(build(spokes=3), wheels.build())" in used
    assert "What ``build`` made" in used
    assert '"casckpt.deep.wheels.build"' in text(project, "tests/deep/test_wheels.py")
    assert text(project, "docs/page.md").startswith("# Page\n\n`build` of `deep/wheels.py`")
    assert "\nbuild         casckpt.deep" in text(project, "docs/page.md")
    assert text(project, "CHANGELOG.md") == FILES["CHANGELOG.md"]


def test_classes_with_the_same_name_are_distinguished_and_unclear_cases_reported(project: Project) -> None:
    _, left = rename(project, "casckpt.deep.wheels.Wheel", "Roller")
    used = text(project, "casckpt/using.py")
    assert "import Roller as P\n" in used
    assert "from casckpt.other import Wheel\n" in used
    assert text(project, "casckpt/other.py") == FILES["casckpt/other.py"]
    assert "Small(Roller)" in text(project, "casckpt/deep/wheels.py")
    assert '"Roller.turn_by"' in text(project, "tools/planted.py")
    assert "A `Roller` that grows less." in text(project, "casckpt/deep/wheels.py")
    assert [one.partition(": ")[0] for one in left] == ["docs/page.md:3"]


def test_a_field_is_renamed_only_for_its_class_and_unknown_objects_are_reported(project: Project) -> None:
    _, left = rename(project, "casckpt.deep.wheels.Wheel.spokes", "length")
    assert "{wheel.length} {other.spokes}" in text(project, "casckpt/using.py")
    assert "[one.length for one in (make_wheel(spokes=3)" in text(project, "casckpt/using.py")
    wheels = text(project, "casckpt/deep/wheels.py")
    assert "One. ``length``: how many it has." in wheels
    assert "Wheel(length=spokes)" in wheels
    assert '"self.length + more",\n        "self.length",' in text(project, "tools/planted.py")
    assert [one.partition(": ")[0] for one in left] == ["tests/deep/test_wheels.py:8"]


def test_objects_of_unknown_types_are_renamed_on_request(project: Project) -> None:
    _, left = rename(project, "casckpt.deep.wheels.Wheel.spokes", "length", doubtful=True)
    assert "given.length" in text(project, "tests/deep/test_wheels.py")
    assert left == []


def test_a_method_is_renamed_together_with_its_overrides(project: Project) -> None:
    rename(project, "casckpt.deep.wheels.Wheel.turn_by", "grown")
    wheels = text(project, "casckpt/deep/wheels.py")
    assert wheels.count("def grown(") == 2
    assert "super().grown(more)" in wheels
    assert '"Wheel.grown"' in text(project, "tools/planted.py")


def test_a_parameter_is_renamed_together_with_keywords_in_calls(project: Project) -> None:
    rename(project, "casckpt.deep.wheels.make_wheel:spokes", "length")
    assert "def make_wheel(length: int = 1)" in text(project, "casckpt/deep/wheels.py")
    assert "return Wheel(spokes=length)" in text(project, "casckpt/deep/wheels.py")
    assert "make_wheel(length=3)" in text(project, "casckpt/using.py")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("casckpt.deep.wheels.make_wheel", "total", "using.py:11"),
        ("casckpt.deep.wheels.Wheel.spokes", "turn_by", "is taken"),
        ("casckpt.deep.wheels.make_wheel:more", "most", "not defined"),
        ("casckpt.deep.wheels.Whole", "Half", "not defined"),
        ("casckpt.shallow.Wheel", "Roller", "not defined"),
        ("casckpt.deep.wheels.Wheel", "class", "not a name"),
    ],
)
def test_a_name_that_is_in_use_or_missing_is_rejected(project: Project, old: str, new: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        rename(project, old, new)
    assert text(project, "casckpt/deep/wheels.py") == FILES["casckpt/deep/wheels.py"]


def test_a_module_moves_with_its_tests_and_references(project: Project) -> None:
    rename(project, "casckpt.using.total", "total_size")
    done, left = move(Project(project.root), "casckpt.deep.wheels", "casckpt.shallow.rollers")
    assert done[:2] == [
        "casckpt/deep/wheels.py -> casckpt/shallow/rollers.py",
        "tests/deep/test_wheels.py -> tests/shallow/test_rollers.py",
    ]
    assert left == ["casckpt/shallow/__init__.py: say what lies here", "tests/shallow/__init__.py: say what lies here"]
    used = text(project, "casckpt/using.py")
    assert "from casckpt.shallow import rollers\n" in used
    assert "rollers.make_wheel()" in used
    assert "see casckpt/shallow/rollers.py" in used
    assert "`shallow/rollers.py`" in text(project, "docs/page.md")
    assert "casckpt.shallow.rollers, that is rollers.py" in text(project, "docs/page.md")
    assert "tests/shallow/test_rollers.py" in text(project, "tools/planted.py")
    assert '"casckpt.shallow.rollers.make_wheel"' in text(project, "tests/shallow/test_rollers.py")


def test_a_package_moves_with_its_contents(project: Project) -> None:
    move(project, "casckpt.deep", "casckpt.far.deeper")
    assert "from casckpt.far.deeper import wheels\n" in text(project, "casckpt/using.py")
    assert "`far/deeper/wheels.py`" in text(project, "docs/page.md")
    assert "from casckpt.far.deeper.wheels import Wheel" in text(project, "tests/far/deeper/test_wheels.py")


def test_a_module_is_merged_into_a_second_module(project: Project) -> None:
    (project.root / "casckpt/using.py").write_text(
        FILES["casckpt/using.py"].replace("import Wheel as P", "import Small")
    )
    with pytest.raises(Refused, match="both modules have Wheel:"):
        move(project, "casckpt.deep.wheels", "casckpt.using")
    text_now = (
        FILES["casckpt/using.py"]
        .replace("import Wheel as P\n", "import Small as Small\n")
        .replace("wheel: P", "wheel: Small")
    )
    (project.root / "casckpt/using.py").write_text(text_now.replace("import Wheel\n", "import Wheel as Other\n"))
    done, _ = move(Project(project.root), "casckpt.deep.wheels", "casckpt.using")
    assert done[0] == "casckpt/deep/wheels.py -> casckpt/using.py (merged)"
    used = text(project, "casckpt/using.py")
    assert used.startswith('"""Uses."""\n\nfrom __future__ import annotations\n\nfrom dataclasses import dataclass\n')
    assert used.index("class Wheel:") < used.index("def total(")
    assert used.count("log = 1") == 1
    assert "from casckpt.deep" not in used
    assert "(make_wheel(spokes=3), make_wheel())" in used


def test_modules_with_a_common_name_are_not_merged(project: Project) -> None:
    with pytest.raises(Refused, match="both modules have Wheel:"):
        move(project, "casckpt.deep.wheels", "casckpt.other")
    assert (project.root / "casckpt/deep/wheels.py").exists()


def test_import_cycles_and_unreachable_fixtures_are_reported(project: Project) -> None:
    (project.root / "tests/deep/conftest.py").write_text("")
    (project.root / "casckpt/deep/wheels.py").write_text("from casckpt.using import total\n\nPART = total\n")
    (project.root / "casckpt/using.py").write_text("from casckpt.deep.wheels import PART\n\ntotal = PART\n")
    _, left = move(project, "casckpt.deep.wheels", "casckpt.rollers")
    assert "tests/deep/conftest.py: its fixtures do not reach tests/test_rollers.py" in left
    assert any(one.startswith("import casckpt.rollers: ImportError") for one in left)


def test_a_single_function_moves_to_a_different_module(project: Project) -> None:
    with pytest.raises(Refused, match="has another Wheel, which make_wheel needs"):
        move(project, "casckpt.deep.wheels.make_wheel", "casckpt.other")
    (project.root / "casckpt/more.py").write_text('"""More."""\n\nlog = 1\n')
    done, left = move(Project(project.root), "casckpt.deep.wheels.make_wheel", "casckpt.more")
    assert done[0] == "make_wheel: casckpt/deep/wheels.py -> casckpt/more.py"
    assert "def make_wheel" not in text(project, "casckpt/deep/wheels.py")
    assert "from casckpt.more import make_wheel\n" in text(project, "casckpt/using.py")
    assert '"casckpt.more.make_wheel"' in text(project, "tests/deep/test_wheels.py")
    assert left[:2] == [
        "casckpt/more.py imports Wheel of casckpt.deep.wheels",
        "casckpt/using.py: still has wheels.make_wheel",
    ]
    assert text(project, "casckpt/more.py").startswith(
        '"""More."""\n\nfrom casckpt.deep.wheels import Wheel\n\nlog = 1\n\n\ndef'
    )
