"""The scenarios, by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.results import ScenarioResult
from benchmarks.scenarios.base import Options
from benchmarks.scenarios.buckets import s3
from benchmarks.scenarios.catalogue import catalogue
from benchmarks.scenarios.cells import cells
from benchmarks.scenarios.dcp import through_dcp
from benchmarks.scenarios.deltas import coded, coding, deltas, runs
from benchmarks.scenarios.folders import folders
from benchmarks.scenarios.groups import ranks
from benchmarks.scenarios.history import history
from benchmarks.scenarios.hosts import hosts
from benchmarks.scenarios.loading import load, partial
from benchmarks.scenarios.manifests import manifest
from benchmarks.scenarios.memory import memory
from benchmarks.scenarios.merging import merge
from benchmarks.scenarios.planning import plan
from benchmarks.scenarios.resharding import reshard
from benchmarks.scenarios.restart import restart
from benchmarks.scenarios.saving import frozen, in_background, resave, save
from benchmarks.scenarios.serving import serve
from benchmarks.scenarios.small import experts, small
from benchmarks.scenarios.updates import update

SCENARIOS: dict[str, Callable[[Options], ScenarioResult]] = {
    "save": save,
    "resave": resave,
    "frozen": frozen,
    "async": in_background,
    "load": load,
    "partial": partial,
    "restart": restart,
    "reshard": reshard,
    "small": small,
    "experts": experts,
    "cells": cells,
    "dcp": through_dcp,
    "plan": plan,
    "ranks": ranks,
    "manifest": manifest,
    "catalogue": catalogue,
    "history": history,
    "memory": memory,
    "s3": s3,
    "hosts": hosts,
    "deltas": deltas,
    "runs": runs,
    "coded": coded,
    "coding": coding,
    "update": update,
    "serve": serve,
    "merge": merge,
    "files": folders,
}
