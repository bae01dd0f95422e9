from __future__ import annotations

import datetime as dt
import zoneinfo
from io import BytesIO

import pytest

from casckpt.errors import InvalidInput
from casckpt.format import plain
from tests.format.test_plain import Parts, back
from tests.support.plain_examples import with_metadata


def test_time_zones_and_utc_decode_exactly() -> None:
    assert back(dt.UTC) is dt.UTC
    assert back(zoneinfo.ZoneInfo("Europe/Berlin")) is zoneinfo.ZoneInfo("Europe/Berlin")


# long buffers


@pytest.mark.parametrize("size", [3, 200])
def test_an_in_memory_stream_keeps_its_position(size: int) -> None:
    parts, stream = Parts(), BytesIO(b"x" * size)
    stream.seek(2)
    data = plain.encode([stream], spill=parts.spill, spill_from=100)
    (found,) = plain.decode(data, load=parts.load)
    assert (type(found), found.getvalue(), found.tell()) == (BytesIO, b"x" * size, 2)
    assert len(parts.parts) == (size > 100)
    stream.close()
    with pytest.raises(InvalidInput, match=r"value\[0\]: a closed BytesIO"):
        plain.encode([stream])


# refused values


def test_an_ordered_dict_with_additional_attributes_is_rejected() -> None:
    value = with_metadata()
    vars(value)["other"] = 1
    with pytest.raises(InvalidInput, match=r"attributes \(\['other'\]\)"):
        plain.encode(value)
