"""Starts a run of small scripts on the mini cluster through the real launcher, and looks at what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.process_table import processes
from tests.slurm.cluster import SlurmCluster
from tests.supervise.job import answers, until
from vime.config import Config, Model, TinyModel
from vime.config.compose import compose, dump_resolved
from vime.models.tiny import tiny_hf_config
from vime.run.directory import RunDir, Status

SCRIPTS = Path(__file__).parent / "scripts"
Programs = Mapping[str, Sequence[str]]
SERVING: Programs = {name: ["serve"] for name in ("trainer", "engine", "router", "generator")}
FINISHING: Programs = {**SERVING, "trainer": ["finish", "1"], "generator": ["finish", "0"]}
SAVING: Programs = {**SERVING, "trainer": ["train"], "generator": ["finish", "0"]}
"""Trainers that wait for the request to save; a generator that has done its part."""
RANKS = ("trainer-0", "trainer-1", "engine-0", "router-0", "generator-0")


def config_in(root: Path, *overrides: str) -> Config:
    """The tiny recipe on the mini cluster with its runs in `root`, and a folder there in place of a model."""
    config = compose("minislurm", "tiny_grpo", [f"run.root={root}/runs", "model.warmup=null", *overrides])
    return config.model_copy(update={"model": Model(path=root)})


class SlurmRun:
    """A launcher process and the run that it submitted."""

    def __init__(
        self,
        cluster: SlurmCluster,
        root: Path,
        programs: Programs,
        *flags: str,
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster, self.root = cluster, root
        (root / "runs").mkdir(parents=True)
        entries = tiny_hf_config(TinyModel(layers=2, context=128))
        (root / "config.json").write_text(json.dumps({"model_type": "qwen3", **entries}))
        self.write(programs)
        (root / "config.yaml").write_text(dump_resolved(config_in(root, *overrides)))
        self.launcher = self._launch(str(root / "config.yaml"), *flags, environ=environ)

    def write(self, programs: Programs) -> None:
        """What the roles of attempts to come run."""
        (self.root / "runs" / "programs.json").write_text(json.dumps(programs))

    def resume(self, *flags: str) -> int:
        """`--resume` of this run, to its end; the launcher's exit code."""
        self.launcher = self._launch("", "--resume", str(self.run.path), *flags)
        return self.end(90)

    def _launch(self, *arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.root / "launcher.log").open("ab") as output:
            return subprocess.Popen(
                [*self.cluster.enter, sys.executable, str(SCRIPTS / "launcher.py"), *arguments],
                env={**self.cluster.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def run(self) -> RunDir:
        """The run directory, once there is one."""
        until(lambda: [*self.root.glob("runs/*/status.json")], 60, f"a run directory: {self.log()}")
        return RunDir(next(self.root.glob("runs/*/status.json")).parent)

    @property
    def job_id(self) -> str:
        """The job, once it is submitted."""
        file = self.run.submitit / "job_id"
        until(file.exists, 30, f"a submission: {self.log()}")
        return file.read_text().strip()

    def status(self) -> Status:
        """The run's status now."""
        return self.run.read_status()

    def seen(self) -> dict[str, dict[str, Any]]:
        """What each role that has started said: pid, port and environ, by name."""
        found = (self.run.path / "seen").glob("[!.]*")
        return {path.name: json.loads(path.read_text()) for path in found}

    def wait_started(self, *names: str) -> None:
        """Wait until the roles `names` (default: all) run."""
        wanted = set(names or RANKS)
        until(lambda: wanted <= set(self.seen()), 180, f"{wanted}: {self.log()}{self.supervisor_log()}")

    def wait_state(self, *states: str, timeout: float = 120) -> Status:
        """Wait until the run is in one of `states`."""
        until(lambda: self.status().state in states, timeout, f"{states}: {self.status()}{self.supervisor_log()}")
        return self.status()

    def log(self) -> str:
        """What the launcher printed."""
        return (self.root / "launcher.log").read_text()

    def supervisor_log(self) -> str:
        """What the batch step and the newest supervisor printed."""
        files = [*self.run.submitit.glob("*.out"), *sorted(self.run.logs.glob("attempt_*/supervisor-0.log"))]
        return "\n" + "\n".join(file.read_text() for file in files)

    def processes(self) -> dict[int, str]:
        """pid -> command line of every live process of this run on any node, the launcher's left out."""
        found = processes(lambda line, environment: f"{self.root}/runs" in environment + line)
        found.pop(self.launcher.pid, None)
        return found

    def batch_step_daemons(self) -> list[int]:
        """Pids of Slurm's own processes that hold its batch step: the last that each does is report its end."""
        title = f"slurmstepd: [{self.job_id}.batch]"
        return list(processes(lambda line, _: line.startswith(title)))

    def kill(self, name: str) -> None:
        """SIGKILL to the process of a role."""
        os.kill(self.seen()[name]["pid"], signal.SIGKILL)

    def end(self, timeout: float) -> int:
        """Wait for the launcher's end; its exit code."""
        return self.launcher.wait(timeout)

    def check_nothing_left(self, timeout: float = 5) -> None:
        """No process of the run lives, and no port of it answers."""
        until(lambda: not self.processes(), timeout, f"no process: {self.processes()}{self.supervisor_log()}")
        for port in {role["port"] for role in self.seen().values()} - {0}:
            until(lambda port=port: not answers(port), 5, f"port {port} to be free")

    def close(self) -> None:
        """End whatever a failed test left."""
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait(10)
        self.cluster.cancel_all()
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
