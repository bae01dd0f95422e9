"""Strictness: what a load does if a sharded state dict and a checkpoint do not have the same keys.

*Missing* keys are in the checkpoint, but no rank requests them. *Unexpected* keys are requested, but not in the
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from enum import Enum

from casckpt.base.text import listed
from casckpt.frontends.megatron.errors import CheckpointingException, ShardedKeyMissing

log = logging.getLogger(__name__)
_SHOWN = 10


class StrictHandling(Enum):
    """The names and values of Megatron-core. Unexpected keys that do not raise are left out of the result."""

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """The caller assumes that there are no unexpected keys; they still raise."""
    LOG_UNEXPECTED = "log_unexpected"
    """Unexpected keys are logged."""
    LOG_ALL = "log_all"
    """Unexpected and missing keys are logged."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys raise."""
    RAISE_ALL = "raise_all"
    """Unexpected and missing keys raise."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Unexpected keys are returned beside the state dict, with an empty set of missing keys."""
    RETURN_ALL = "return_all"
    """Missing and unexpected keys are returned beside the state dict."""
    IGNORE_ALL = "ignore_all"
    """Missing and unexpected keys are ignored."""

    @property
    def raises(self) -> bool:
        """Whether unexpected keys raise."""
        return self.name.startswith(("ASSUME", "RAISE"))

    @property
    def logs(self) -> bool:
        """Whether unexpected keys are logged."""
        return self.name.startswith("LOG")

    @property
    def returns(self) -> bool:
        """Whether keys are returned."""
        return self.name.startswith("RETURN")

    @property
    def looks_for_missing(self) -> bool:
        """Whether missing keys matter. They are known only after all ranks have requested theirs."""
        return self in (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Whether Megatron-core reads the keys of the checkpoint before a load. casckpt always knows them."""
        return parse_strict_flag(val) is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Whether Megatron-core gathers the requests of all ranks."""
        strict = parse_strict_flag(val)
        return strict.looks_for_missing or strict is StrictHandling.IGNORE_ALL

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Whether `load` returns keys beside the state dict."""
        return parse_strict_flag(val).returns


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Convert a StrictHandling or the value of one. Raises CheckpointingException (a ValueError)."""
    try:
        return StrictHandling(getattr(strict, "value", strict))  # Megatron-core's own enum has a value too
    except ValueError as error:
        known = ", ".join(repr(member.value) for member in StrictHandling)
        raise CheckpointingException(f"strict={strict!r} is not known; give one of {known}") from error


def check_unexpected(strict: StrictHandling, where: str, unexpected: Collection[str]) -> None:
    """Raise ShardedKeyMissing, or log, as ``strict`` says."""
    if unexpected and strict.raises:
        raise ShardedKeyMissing(
            f"{where} lacks {_listed(unexpected)}; strict='log_unexpected' leaves them out of what is loaded",
            keys=tuple(sorted(unexpected)),
        )
    if unexpected and strict.logs:
        log.warning("%s lacks %s, which were asked for", where, _listed(unexpected))


def check_missing(strict: StrictHandling, where: str, missing: Collection[str]) -> None:
    """Raise CheckpointingException for keys that no rank requests, if ``strict`` says so."""
    if missing and strict is StrictHandling.RAISE_ALL:
        raise CheckpointingException(
            f"{where} holds {_listed(missing)}, which no rank asks for; strict='raise_unexpected' leaves them unread",
            keys=tuple(sorted(missing)),
        )


def log_missing(strict: StrictHandling, where: str, missing: Collection[str]) -> None:
    """Log missing keys on every rank, if ``strict`` says so, because each rank has its own log."""
    if missing and strict is StrictHandling.LOG_ALL:
        log.warning("%s holds %s, which no rank asked for", where, _listed(missing))


def _listed(keys: Collection[str]) -> str:
    return listed(sorted(keys), _SHOWN)
