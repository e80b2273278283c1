"""A run's folder: where everything of a run lies, and how its small files are written and read.

A status file is replaced whole, events and metrics are appended a line at a time, so that a reader at any moment sees
either the old or the new, and at worst a last line that is torn.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from vime.config.file_kind import read_regular
from vime.errors import UserError
from vime.run.files import reserve, write_atomic, write_reserved
from vime.run.jsonl import _append_line
from vime.run.role import Role

State = Literal["pending", "running", "requeued", "completed", "failed", "cancelled", "timeout"]
TERMINAL: frozenset[State] = frozenset({"completed", "failed", "cancelled", "timeout"})


def utc_now() -> str:
    """The time as ISO 8601 in UTC with milliseconds: 2026-11-29T19:43:08.123Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def node_name() -> str:
    """This node as the scheduler calls it, else the host's name."""
    return os.environ.get("VIME_NODE") or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class Failure:
    """The first role that ended as it should not, and the last lines it wrote."""

    role: str
    rank: int
    node: str
    exit_code: int | None
    """None when a signal ended it, or when nobody could learn the code."""
    signal: str | None
    """Name such as SIGKILL."""
    time: str
    log: str
    """Path of its log."""
    tail: list[str]
    """Last lines of that log."""


@dataclass(frozen=True)
class Status:
    """What `status.json` says of a run."""

    state: State
    attempt: int = 1
    step: int = 0
    """Optimizer steps done."""
    started: str | None = None
    ended: str | None = None
    failure: Failure | None = None

    @property
    def terminal(self) -> bool:
        """Whether the run has ended for good."""
        return self.state in TERMINAL


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str | None, recipe: str) -> RunDir:
        """Make the folder, exclusively and readable by its owner only.

        The default name is <recipe>-<UTC time>-<4 hex digits>. Raises UserError when a folder of the given name exists
        or `root` cannot be written.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run.root={root} cannot be made: {error.strerror}") from error
        for _ in range(100):
            time = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            path = (root / (name or f"{recipe}-{time}-{secrets.token_hex(2)}")).absolute()
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                if name is not None:
                    raise UserError(f"run.name={name}: {path} exists already; give another name or none") from None
                continue
            except OSError as error:
                raise UserError(f"run.root={root} cannot be written: {error.strerror}") from error
            return cls(path)
        raise UserError(f"run.root={root}: no free name for a run of {recipe} in 100 tries")

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """Roles -> nodes -> GPUs -> ranks."""
        return self.path / "plan.json"

    @property
    def submission(self) -> Path:
        """Exactly what was submitted."""
        return self.path / "submission.sbatch"

    @property
    def submitit(self) -> Path:
        """submitit's own folder: the pickled job, its output and its result."""
        return self.path / "submitit"

    @property
    def status(self) -> Path:
        """State, attempt, step and first failure."""
        return self.path / "status.json"

    @property
    def metrics(self) -> Path:
        """One object a training step."""
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """One object a lifecycle event of any role."""
        return self.path / "events.jsonl"

    @property
    def buffer(self) -> Path:
        """Chunks and batch manifests."""
        return self.path / "buffer"

    @property
    def checkpoints(self) -> Path:
        """Folders step_<n>."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """Hugging Face folders step_<n>."""
        return self.path / "export"

    @property
    def logs(self) -> Path:
        """Folders attempt_<n> and the link `latest`."""
        return self.path / "logs"

    def log(self, role: str, rank: int, attempt: int) -> Path:
        """Where everything that one process of one attempt printed lies."""
        return self.logs / f"attempt_{attempt}" / f"{role}-{rank}.log"

    def append_event(self, role: Role, event: str, **details: Any) -> None:
        """Add one lifecycle event of `role`; `details` are JSON values."""
        origin = {"attempt": role.attempt, "role": role.name, "rank": role.rank, "node": node_name()}
        _append_line(self.events, {"time": utc_now(), **origin, "event": event, **details})

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add one training step's metrics. Written by trainer rank 0 only."""
        _append_line(self.metrics, metrics)

    def read_status(self) -> Status:
        """Read status.json. Raises UserError when there is none or it does not read as one."""
        try:
            return _STATUS.validate_json(read_regular(self.status, MAX_STATUS), strict=True)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is not a run directory: it has no status.json") from None
        except OSError as error:
            raise UserError(f"{self.status} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(f"{self.status} does not read as a status: {place}: {first['msg']}") from error

    def write_status(self, status: Status) -> None:
        """Replace status.json. A last status is written into the space reserved for it when the disk is full.

        Raises OSError when it cannot be written.
        """
        last = status.terminal or status.state == "requeued"
        try:
            write_atomic(self.status, _json(status))
        except OSError:
            if not last or not self._reserved.exists():
                raise
            write_reserved(self.status, self._reserved, _json(_clipped(status)))
        if status.terminal and status.ended is not None:
            self._reserved.unlink(missing_ok=True)

    def reserve_status(self) -> None:
        """Keep space for a last status: it must be written when the disk of the run is full."""
        reserve(self._reserved)

    @property
    def _reserved(self) -> Path:
        return self.path / ".status.reserved"


def _json(status: Status) -> str:
    return json.dumps(asdict(status), indent=2) + "\n"


def _clipped(status: Status) -> Status:
    """`status` with a log's tail that surely fits into the reserved space."""
    if status.failure is None:
        return status
    return replace(status, failure=replace(status.failure, tail=[line[:300] for line in status.failure.tail]))


_STATUS = TypeAdapter(Status)
MAX_STATUS = 4 << 20
"""Bytes of a status, of which a log's last lines are the most."""
