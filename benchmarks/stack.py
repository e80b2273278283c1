"""A real engine, and a router in front of it, as a run has them."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vime.buffer.control import Control
from vime.config import Cluster, Config, Data, Model, Rollout, Training, Weights
from vime.config.compose import dump_resolved
from vime.run.directory import RunDir
from vime.run.role import Role
from vime.supervise.commands import thread_counts

STARTUP, STOP = 300.0, 15.0
CONTEXT = 128


@dataclass(frozen=True)
class Stack:
    """Where the servers answer. `role` is the engine's: its token, store and model are the run's."""

    config: Config
    role: Role
    run_dir: RunDir
    control: Control
    engine_url: str
    router_url: str | None


def bench_config(model: Path) -> Config:
    """float32 on this machine; sums of one-digit numbers in the manner of tiny_grpo."""
    return Config(
        recipe="benchmark",
        cluster=Cluster(name="local", startup_timeout=STARTUP),
        model=Model(path=model),
        data=Data(
            task_args={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            template="{expression} =",
            size=2000,
        ),
        rollout=Rollout(dtype="float32", max_response_tokens=8, context=CONTEXT, kv_cache_gb=0.5),
        training=Training(ranks=2, dtype="float32", max_tokens_per_microbatch=4096),
        weights=Weights(backend="gloo", timeout=60.0),
    )


@contextmanager
def serve(model: Path, folder: Path, *, router: bool) -> Iterator[Stack]:
    """Start the roles on the model of a Hugging Face folder; both are gone at the end.

    Raises WaitTimeout, after which the logs' last lines are on stderr.
    """
    config = bench_config(model)
    run_dir = RunDir.create(folder, "run", "benchmark")
    run_dir.config.write_text(dump_resolved(config), encoding="utf-8")
    token = secrets.token_hex(16)
    control, port = Control.serve("127.0.0.1", 1, token)
    role = Role(run_dir.path, "127.0.0.1", port, "engine", 1, token, 0, 1, "127.0.0.1", model)
    processes = [_start(role, "vime.rollout.engine.engine", thread_counts(1))]
    try:
        if router:
            processes.append(_start(replace(role, name="router"), "vime.rollout.router.router", thread_counts(None)))
        try:
            engine_url = control.engine(0, STARTUP).url
            router_url = control.router(STARTUP) if router else None
        except TimeoutError:
            print(run_dir.log("engine", 0, 1).read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
            raise
        yield Stack(config, role, run_dir, control, engine_url, router_url)
    finally:
        for process in reversed(processes):
            _end(process)


def _start(role: Role, module: str, threads: dict[str, str]) -> subprocess.Popen[bytes]:
    log = RunDir(role.run_dir).log(role.name, role.rank, role.attempt)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            env=os.environ | role.environment() | threads | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP)
