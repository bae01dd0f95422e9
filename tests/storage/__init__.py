"""Tests of the storage backends."""

import pytest

pytest.register_assert_rewrite("tests.storage.contract")
