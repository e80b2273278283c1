from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vime.errors import UserError
from vime.run.role import Role

ROLE = Role(Path("/runs/a"), "10.0.0.1", 4711, "trainer", 2, "secret", 1, 4, "10.0.0.2", Path("/models/m"))
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("host", ["10.0.0.1", "node7", "fe80::1"])
def test_a_role_reads_what_it_wrote(host: str) -> None:
    role = Role(Path("/runs/a"), host, 4711, "trainer", 2, "secret", 1, 4, "10.0.0.2", Path("/models/m"))
    assert Role.from_environment(role.environment()) == role


def test_under_srun_the_step_gives_the_rank() -> None:
    environ = ROLE.environment()
    del environ["VIME_RANK"], environ["VIME_WORLD_SIZE"]
    role = Role.from_environment({**environ, "SLURM_PROCID": "3", "SLURM_NTASKS": "8"})
    assert (role.rank, role.world_size) == (3, 8)


def test_a_rank_that_the_launcher_gave_is_not_overruled() -> None:
    assert Role.from_environment({**ROLE.environment(), "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}) == ROLE


@pytest.mark.parametrize("name", sorted(ROLE.environment()))
def test_a_missing_variable_is_named(name: str) -> None:
    environ = ROLE.environment()
    del environ[name]
    with pytest.raises(UserError, match=f"{name} is not set"):
        Role.from_environment(environ)


@pytest.mark.parametrize("value", ["10.0.0.1", "10.0.0.1:", "10.0.0.1:http"])
def test_a_store_without_a_port_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="VIME_STORE"):
        Role.from_environment({**ROLE.environment(), "VIME_STORE": value})


def test_the_token_does_not_show() -> None:
    assert "secret" not in repr(ROLE)


CHILD = """
import time
from vime.run.role import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert parent.stdout is not None
    with parent, parent.stdout:
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        parent.wait(10)
        assert _gone(child)


def test_a_child_whose_parent_had_gone_before_it_asked_dies_at_once() -> None:
    code = (
        "import os; from vime.run.role import die_with_parent; die_with_parent(parent=os.getppid() + 1); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=REPOSITORY, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except OSError:
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False
