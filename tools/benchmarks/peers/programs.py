"""Programs that store folders, each with the command lines of its best settings. They run in a folder of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = "repository"
COPY = "cp -a and fsync"


@dataclass(frozen=True)
class Setting:
    """Command lines, in which {folder} is the path of a version, and {version} its name.

    ``create`` makes the repository, in the folder ``repository``. ``place``, if given, puts a version where the program
    stores it from, which is not measured.
    """

    create: tuple[str, ...]
    store: str
    place: str = ""
    repository: str = REPOSITORY


def _restic(compression: str) -> Setting:
    return Setting(("restic init",), f"restic backup --compression {compression} {{folder}}")


def _borg(options: str) -> Setting:
    return Setting(("borg init --encryption none",), f"borg create {options} ::{{version}} {{folder}}")


def _dvc(*config: str) -> Setting:
    create = ("dvc init --no-scm", *config)
    return Setting(create, "dvc add {version}", "cp -a --reflink=auto {folder} .", ".dvc/cache")


SETTINGS = {
    COPY: {"": Setting((f"mkdir {REPOSITORY}",), f"cp -a --reflink=never {{folder}} {REPOSITORY}")},
    "restic": {  # which always encrypts
        "encrypted": _restic("off"),
        "encrypted, compression auto": _restic("auto"),
    },
    "borg": {
        "": _borg("--compression none"),
        "fixed chunks": _borg("--compression none --chunker-params fixed,4194304"),
        "zstd,1": _borg("--compression zstd,1"),
    },
    "dvc": {"reflinks or copies": _dvc(), "hard links": _dvc("dvc config cache.type hardlink")},
}


def environment(place: Path) -> dict[str, str]:
    """Return the variables that make the programs keep everything below ``place``, and send nothing."""
    return {
        "HOME": str(place),
        "XDG_CACHE_HOME": str(place / "cache"),
        "RESTIC_REPOSITORY": REPOSITORY,
        "RESTIC_PASSWORD": "bench",
        "BORG_REPO": REPOSITORY,
        "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
        "DVC_SITE_CACHE_DIR": str(place / "site"),
        "DVC_NO_ANALYTICS": "1",
    }
