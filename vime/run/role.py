"""Who a process of a run is: the environment contract between the launcher and every role.

The launcher starts a role with these variables, and a role reads nothing else about its place in the run. No role knows
whether a process table, a heterogeneous SLURM job or a sliced allocation started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vime.errors import UserError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded here because `die_with_parent` also runs between fork and exec, where the loader's lock may be held.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


@dataclass(frozen=True)
class Role:
    """One process's place in one attempt of a run. `token` is a secret: it is kept out of `repr`."""

    run_dir: Path
    store_host: str
    store_port: int
    name: str
    attempt: int
    token: str
    rank: int
    world_size: int
    host: str
    model: Path

    def __repr__(self) -> str:
        return f"Role({self.name}-{self.rank} of {self.world_size}, attempt {self.attempt}, {self.run_dir})"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Role:
        """Read the variables that `environment` writes.

        Where `VIME_RANK` is absent (a step of srun) rank and world size are SLURM_PROCID and SLURM_NTASKS.
        Raises UserError naming the variable that is missing or not a number.
        """
        store_host, _, store_port = _text(environ, "VIME_STORE").rpartition(":")
        under_srun = "VIME_RANK" not in environ and "SLURM_PROCID" in environ
        return cls(
            run_dir=Path(_text(environ, "VIME_RUN_DIR")),
            store_host=store_host.strip("[]"),
            store_port=_number("VIME_STORE", store_port),
            name=_text(environ, "VIME_ROLE"),
            attempt=_number("VIME_ATTEMPT", _text(environ, "VIME_ATTEMPT")),
            token=_text(environ, "VIME_RUN_TOKEN"),
            rank=_read_number(environ, "SLURM_PROCID" if under_srun else "VIME_RANK"),
            world_size=_read_number(environ, "SLURM_NTASKS" if under_srun else "VIME_WORLD_SIZE"),
            host=_text(environ, "VIME_HOST"),
            model=Path(_text(environ, "VIME_MODEL")),
        )

    def environment(self) -> dict[str, str]:
        """The variables from which `from_environment` makes an equal Role."""
        store_host = f"[{self.store_host}]" if ":" in self.store_host else self.store_host
        return {
            "VIME_RUN_DIR": str(self.run_dir),
            "VIME_STORE": f"{store_host}:{self.store_port}",
            "VIME_ROLE": self.name,
            "VIME_ATTEMPT": str(self.attempt),
            "VIME_RUN_TOKEN": self.token,
            "VIME_RANK": str(self.rank),
            "VIME_WORLD_SIZE": str(self.world_size),
            "VIME_HOST": self.host,
            "VIME_MODEL": str(self.model),
        }


def die_with_parent(parent: int | None = None, signum: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when the thread that started it ends. Linux only, else nothing.

    `parent` is the pid this process expects its parent to have. A parent that ended before the request was made would
    go unnoticed, so the pid is compared afterwards; without `parent`, with what it was a moment before. The request
    survives exec and is not inherited by children.
    """
    if _LIBC is None:
        return
    expected = os.getppid() if parent is None else parent
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Make orphans below this process its children, so that they can be found and ended. Linux only."""
    if _LIBC is None:
        return
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _text(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise UserError(f"{name} is not set: a role is started by the supervisor of a run, not by hand")
    return value


def _number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}, which does not hold the number it should") from None


def _read_number(environ: Mapping[str, str], name: str) -> int:
    return _number(name, _text(environ, name))
