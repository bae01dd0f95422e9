"""Fixtures for tests that use a repository without tensors."""

from tests.repository.conftest import faults, repo

__all__ = ["faults", "repo"]
