"""Folders of another program, stored by casckpt and by programs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import files
from benchmarks.measure import Measured, Meter
from benchmarks.peers.programs import REPOSITORY, SETTINGS, environment
from benchmarks.values import specs
from benchmarks.worker import WrongBytes

if TYPE_CHECKING:
    from benchmarks.worker import Here

VERSIONS = ("first", "next")
_STEPS, _RATE, _CHANGE = 100, 1e-5, 1e-4
_PARAMETER = 2 + 2 * 4 * 2 / 3  # bytes for each parameter: its weight, and the moments of two in three


def make(here: Here, folder: str, size: int) -> dict[str, int]:
    """Write two versions of a Hugging Face checkpoint, some training steps apart. Return the bytes of each.

    A third of the weights is frozen. All moments change, and the trained weights, unless bfloat16 rounds it away.
    """
    return {version: _write(Path(folder, version), size, number) for number, version in enumerate(VERSIONS)}


def _write(folder: Path, size: int, number: int) -> int:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    weights, moments, before = dict[str, torch.Tensor](), dict[int, dict[str, torch.Tensor]](), 0
    state = specs("model", int(size * 2 / _PARAMETER))
    frozen = sum(spec.nbytes for spec in state) / 3
    for index, spec in enumerate(state):
        draw = torch.Generator().manual_seed(index)
        weight = torch.randn(spec.shape, generator=draw) * 0.02
        if before >= frozen:
            draw.manual_seed(len(state) * (number + 1) + index)
            first, second = (torch.randn(spec.shape, generator=draw) * _CHANGE for _ in range(2))
            weight -= number * first
            moments[index] = {"step": torch.tensor(float(_STEPS)), "exp_avg": first, "exp_avg_sq": second.square()}
        weights[spec.name] = weight.bfloat16()
        before += spec.nbytes
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    groups = [{"lr": _RATE, "betas": (0.9, 0.999), "params": list(moments)}]
    torch.save({"state": moments, "param_groups": groups}, folder / "optimizer.pt")
    torch.save({"last_epoch": number, "_last_lr": [_RATE]}, folder / "scheduler.pt")
    history = [{"step": step, "loss": 2.0 / (step + 1)} for step in range((number + 1) * _STEPS)]
    for name, content in {"config": {"model_type": "llama"}, "trainer_state": {"log_history": history}}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2))
    files.make_durable(folder)
    return sum(path.stat().st_size for path in files.files_of(folder))


def by_casckpt(here: Here, *, folder: str, place: str, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Import both versions into a new store, export them, and compare them."""
    import casckpt

    repository = Path(place, REPOSITORY)
    store = casckpt.open(repository, cache_dir=Path(place, "cache"))
    store.repository.create()

    def add(source: Path) -> None:
        store.import_files(source, run="bench", step=VERSIONS.index(source.name), **setting)

    found = [_measured(source, repository, lambda _: None, add) for source in _versions(folder)]
    for step, source in enumerate(_versions(folder)):
        back = Path(place, source.name)
        store.export(f"bench@{step}", back, format="files")
        if subprocess.run(["diff", "-rq", source, back], check=False).returncode:
            raise WrongBytes(f"the export of the {source.name} version is different")
    return [asdict(one) for one in found]


def by_program(here: Here, *, path: str | None, who: str, what: str, folder: str, place: str) -> list[dict[str, Any]]:
    """Store both versions in a new repository of the program at ``path``, or of one that every machine has."""
    setting, home = SETTINGS[who][what], Path(place)
    repository = home / setting.repository

    def run(line: str, source: Path = Path()) -> None:
        name, *words = [word.format(folder=source, version=source.name) for word in line.split()]
        command = [path or name, *words] if name == who else [name, *words]
        done = subprocess.run(
            command, cwd=home, env=os.environ | environment(home), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{name} {words[0]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")

    def prepare(source: Path) -> None:
        if setting.place:
            run(setting.place, source)
            files.make_durable(home / source.name)

    def add(source: Path) -> None:
        run(setting.store, source)
        files.make_durable(repository)

    home.mkdir(parents=True)
    for line in setting.create:
        run(line)
    found = [_measured(source, repository, prepare, add) for source in _versions(folder)]
    return [asdict(one) | {"peak": None} for one in found]  # the memory of a program that has ended is not known


def _versions(folder: str) -> Iterator[Path]:
    return (Path(folder, version) for version in VERSIONS)


def _measured(source: Path, repository: Path, prepare: Callable[[Path], None], add: Callable[[Path], None]) -> Measured:
    prepare(source)
    files.bring_into_cache(source)
    before = files.stored(repository)
    meter = Meter()
    add(source)
    measured = meter.stop()
    measured.stored = files.stored(repository) - before
    return measured
