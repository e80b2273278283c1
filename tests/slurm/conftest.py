from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import SlurmCluster, missing
from tests.slurm.job import SlurmRun
from tests.slurm.shape import SMALL, Shape
from tests.slurm.trixie import NoTrixie, release_mounts, root

Clusters = Callable[[Shape], SlurmCluster]
"""Gives a running cluster of a shape; each shape is started once."""


@contextmanager
def _clusters(root: Path | None = None) -> Iterator[Clusters]:
    running: dict[Shape, SlurmCluster] = {}

    def of(shape: Shape) -> SlurmCluster:
        if shape not in running:
            running[shape] = SlurmCluster(shape, root)
        return running[shape]

    try:
        yield of
    finally:
        for cluster in running.values():
            cluster.close()


@pytest.fixture(scope="session")
def slurm_clusters() -> Iterator[Clusters]:
    """Clusters of this machine's own Slurm. Skips where none can be had."""
    reason = missing()
    if reason:
        pytest.skip(f"not run on a real Slurm: {reason}")
    with _clusters() as of:
        yield of


@pytest.fixture(scope="session")
def new_slurm_clusters() -> Iterator[Clusters]:
    """Clusters of Slurm 24.11. Skips where none can be had."""
    try:
        folder = root()
    except NoTrixie as reason:
        pytest.skip(f"not run on Slurm 24.11: {reason}")
    try:
        with _clusters(folder) as of:
            yield of
    finally:
        release_mounts(folder)


@pytest.fixture
def slurm(slurm_clusters: Clusters) -> Iterator[SlurmCluster]:
    """The small cluster: partitions `train` (two nodes), `rollout` (one) and `all`. A test's jobs end with the test."""
    cluster = slurm_clusters(SMALL)
    yield cluster
    cluster.cancel_all()


@pytest.fixture
def start(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., SlurmRun]]:
    """Starts runs on the small cluster and, after the test, ends what is left of them."""
    runs: list[SlurmRun] = []

    def begin(*arguments: Any, **options: Any) -> SlurmRun:
        runs.append(SlurmRun(slurm, tmp_path / f"run{len(runs)}", *arguments, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()
