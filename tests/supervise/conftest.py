from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.supervise.job import Job


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs and, after the test, ends what is left of them."""
    jobs: list[Job] = []

    def begin(*arguments: Any, **options: Any) -> Job:
        root = tmp_path / f"runs{len(jobs)}"
        root.mkdir()
        jobs.append(Job(root, *arguments, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()
