"""Which tests are slow; and tests side by side (pytest-xdist): which share a worker, which begin first, and how
interrupted workers end.

A good part of the tests waits rather than computes (for Slurm, for a process that starts), so two workers on two cores
take little more than half of one's time.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

SHARED = {
    "tests/rollout/engine/test_engine.py": "engine",
    "tests/rollout/engine/test_transfer.py": "engine",
    "tests/rollout/engine/test_versions.py": "engine",
    "tests/rollout/test_generator.py": "engine",
    "tests/rollout/test_own_logic.py": "engine",
    "tests/training/test_engine_teacher.py": "engine",
    "tests/slurm/test_gb200.py": "new Slurm",
    "tests/slurm/test_new_slurm.py": "new Slurm",
}
"""Files that use a fixture of the session that is dear to make, and its name: they share a worker."""
LONGEST = (
    "tests/slurm/test_requeue.py",
    "tests/test_main_job.py",
    "tests/training/test_resume_run.py",
    "engine",
    "tests/training/test_checkpoint.py",
    "tests/training/test_algorithms.py",
    "tests/slurm/test_run.py",
    "tests/slurm/test_tiny_grpo.py",
    "tests/supervise/test_kill.py",
    "tests/slurm/test_sweep.py",
    "tests/slurm/test_preempt.py",
    "tests/slurm/test_preflight.py",
)
"""Groups by their time. They begin first, so that the short ones fill the workers' ends."""
STARTING = ("ranks", "start")
"""Fixtures that start Megatron ranks or a whole run: what uses one is slow."""
END_SECONDS = 180.0
"""What the fixtures of an interrupted worker have for ending their runs and engines."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is slow by what it starts. In a worker: puts long groups first."""
    for item in items:
        if set(STARTING) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    if not hasattr(config, "workerinput"):
        return
    places = []
    for item in items:
        group = group_of(item.nodeid)
        place = LONGEST.index(group) if group in LONGEST else len(LONGEST)
        places.append((place, item.get_closest_marker("slow") is None))
    items[:] = [items[index] for index in sorted(range(len(items)), key=places.__getitem__)]


def group_of(nodeid: str) -> str:
    """What shares a worker with a test: its file, or a group of files."""
    file = nodeid.partition("::")[0]
    return SHARED.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """A unit of work is a group."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False  # the order is ours
    return Groups(config, log)


def end_worker_once() -> None:
    """In a worker: the first interruption ends its tests, a further one does not break into their fixtures' end.

    Ctrl-C comes twice: from the terminal, and from the process that waits for the workers.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: None)
        raise KeyboardInterrupt

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupt)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """When interrupted: the workers end as one process would. Left alone, xdist kills them after 10 s."""
    if not session.config.pluginmanager.has_plugin("dsession") or exitstatus == pytest.ExitCode.OK:
        return
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        workers = psutil.Process().children()
        for worker in workers:
            worker.terminate()
        psutil.wait_procs(workers, timeout=END_SECONDS)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """An interrupted worker is gone once its fixtures have ended: nothing else tells the process that waits for it."""
    session = config.pluginmanager.get_plugin("session")
    if hasattr(config, "workerinput") and getattr(session, "exitstatus", 0) == pytest.ExitCode.INTERRUPTED:
        os._exit(pytest.ExitCode.INTERRUPTED)
