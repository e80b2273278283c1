"""Live processes by what their command line or environment holds: the one scan that tests make of all processes."""

from __future__ import annotations

from collections.abc import Callable

import psutil


def processes(wanted: Callable[[str, str], bool]) -> dict[int, str]:
    """pid -> command line of every live process but this one for which `wanted(command line, environment)`.

    A process that has ended, or belongs to another user, has neither.
    """
    found = {}
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            environment = "\n".join(f"{name}={value}" for name, value in process.environ().items())
        except (psutil.Error, OSError):
            continue
        if process.pid != psutil.Process().pid and wanted(line, environment):
            found[process.pid] = line
    return found
