"""The line that sums up a save."""

from __future__ import annotations

import logging
import re
import time

import pytest

from casckpt.frontends.trainer import Checkpointer
from tests.support.saves import small
from tests.support.training import trained

# what is said


def test_each_save_logs_a_summary(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "casckpt")
    model, _ = trained()
    with Checkpointer(small(), run="sft", max_checkpoints=1) as checkpointer:
        checkpointer.save(1, model)
        checkpointer.save_async(2, model)
        checkpointer.wait()
        assert checkpointer.summary is not None
        assert checkpointer.summary.forgotten == (1,)
        assert checkpointer.summary.bytes_new == 0
        assert checkpointer.summary.bytes_reused == checkpointer.summary.checkpoint.stats.bytes_total > 0
    lines = [record.message for record in caplog.records if record.message.startswith("saved")]
    number = r"\d+\.\d"
    assert re.fullmatch(
        rf"saved sft@2: blocked {number}\d s, durable after {number}\d s, 0.0 MiB new, {number} MiB reused; "
        "forgot sft@1",
        lines[1],
    )
    assert len(lines) == 2


# used wrongly


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_summary_has_the_time_that_the_loop_waited(how: str) -> None:
    model, optimizer = trained()
    begun = time.monotonic()
    with Checkpointer(small(), run="sft") as checkpointer:
        getattr(checkpointer, how)(1, model, optimizer)
    took, told = time.monotonic() - begun, checkpointer.summary
    assert told is not None
    assert 0 < told.blocked <= told.durable <= took
    assert (told.checkpoint.step, told.forgotten) == (1, ())
