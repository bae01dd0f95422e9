"""Tests of the storages."""

import pytest

pytest.register_assert_rewrite("tests.storage.contract")
