"""Shared rank processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Rank processes of the session."""
    pool = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
