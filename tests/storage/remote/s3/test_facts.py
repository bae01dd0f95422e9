"""What doctor is told of a bucket whose server refuses to answer."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from casckpt.storage.remote.s3.facts import examine


@pytest.mark.parametrize(("hours", "says"), [(5, "s behind the server"), (-5, "s ahead of the server")])
def test_a_clock_that_the_server_refuses_is_told(hours: int, says: str) -> None:
    there = format_datetime(datetime.now(UTC) + timedelta(hours=hours), usegmt=True)

    def refuse(operation: str, **_: Any) -> Any:
        meta = {"HTTPStatusCode": 403, "HTTPHeaders": {"date": there}}
        raise ClientError({"Error": {"Code": "RequestTimeTooSkewed"}, "ResponseMetadata": meta}, operation)

    clock, *others = examine(refuse, "store/")
    assert (clock.name, clock.ok) == ("clock", False)
    assert says in clock.found
    assert "NTP" in clock.advice
    assert all(finding.ok is None for finding in others)
