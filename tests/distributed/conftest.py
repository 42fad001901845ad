"""One pool of workers for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    pool = World()
    yield pool
    pool.close()
