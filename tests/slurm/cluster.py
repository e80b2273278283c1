"""A real Slurm on this machine, for tests: munge, slurmctld and one slurmd a node, in a folder of its own.

`python -m tests.slurm.cluster` starts the cluster of clusters/minislurm.yaml and keeps it until Ctrl-C.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.process_table import processes
from tests.slurm.shape import SMALL, Ports, Shape, write_configuration

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
START_TIMEOUT = 60.0
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def missing() -> str:
    """Why no Slurm can be started here; empty when it can. As root it installs Debian's packages first."""
    if not _absent():
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"Slurm is not installed ({', '.join(_absent())} missing) and this user cannot install it by apt-get"
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    packages = ("slurm-wlm", "munge")
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", *command],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            return f"apt-get {command[0]} of {' and '.join(packages)} failed: {reason[0]}"
    return f"{', '.join(_absent())} missing after the installation" if _absent() else ""


def _absent() -> list[str]:
    return [name for name in NEEDED if shutil.which(name, path=_PATH) is None]


class SlurmCluster:
    """The daemons of one cluster. `environ` is what a person logged in to it has."""

    def __init__(self, shape: Shape = SMALL, root: Path | None = None) -> None:
        """root: a folder with another Slurm, to chroot into; None: this machine's own."""
        self.shape = shape
        # A short path: the munge socket's name may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="vime-slurm-", dir=None if root is None else root / "tmp"))
        # The folder as the daemons see it.
        self.seen = self.folder if root is None else Path("/") / self.folder.relative_to(root)
        # What comes before a command of this cluster.
        self.enter: tuple[str, ...] = () if root is None else ("chroot", str(root))
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))},
            "PATH": _PATH,
            "SLURM_CONF": str(self.seen / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command as a person logged in to the cluster."""
        done = subprocess.run(
            [*self.enter, *command], env=self.environ, capture_output=True, text=True, check=False, timeout=timeout
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done

    def jobs(self) -> list[str]:
        """The ids of every job that has not ended, as squeue prints them."""
        return self.run("squeue", "-h", "-o", "%i").stdout.split()

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says about one job (or component)."""
        text = self.run("scontrol", "show", "job", "-o", job_id).stdout.splitlines()[0]
        return dict(field.split("=", 1) for field in text.split() if "=" in field)

    def kill_node(self, name: str) -> None:
        """SIGKILL the slurmd of one node. What runs on the node goes on, as after a hung daemon."""
        self._daemons[name].kill()
        self._daemons[name].wait(10)

    def start_node(self, name: str) -> None:
        """Start the slurmd of one node (again) and wait until the node is idle."""
        self._slurmd(name)
        self._wait_idle([name])

    def cancel_all(self) -> None:
        """Cancel every job and wait until all have ended."""
        for job in self.jobs():
            self.run("scancel", job, check=False)
        deadline = time.monotonic() + 30
        while self.jobs() and time.monotonic() < deadline:
            time.sleep(0.2)

    def close(self) -> None:
        """End everything that was started, by pid, and remove the folder."""
        if "slurmctld" in self._daemons and self._daemons["slurmctld"].poll() is None:
            try:
                self.cancel_all()
            except (AssertionError, subprocess.TimeoutExpired):
                pass
        for name in [*(name for name in self._daemons if name not in ("slurmctld", "munged")), "slurmctld", "munged"]:
            daemon = self._daemons.get(name)
            if daemon is None or daemon.poll() is not None:
                continue
            daemon.terminate()
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(5)
        for pid in self.leftovers():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)

    def leftovers(self) -> list[int]:
        """Pids of processes that this cluster started in any way: their environment names its slurm.conf."""
        setting = f"SLURM_CONF={self.environ['SLURM_CONF']}"
        return list(processes(lambda _, environment: setting in environment.split("\n")))

    def _start(self) -> None:
        self.folder.chmod(0o755)
        for name in ("state", "spool", *(f"spool/{node}" for node in self.shape.names)):
            (self.folder / name).mkdir()
        write_configuration(self.shape, self.folder, self.seen, Ports.free(len(self.shape.names)))
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key-file": key.name, "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
        options = [f"--{option}={self.seen / name}" for option, name in files.items()]
        socket = self.folder / "munge.socket"
        at = self.seen / socket.name
        self._daemon("munged", ["munged", "--foreground", "--force", f"--socket={at}", *options])
        self._until(socket.exists, "munge's socket")
        self._daemon("slurmctld", ["slurmctld", "-D", "-i", "-f", self.environ["SLURM_CONF"]])
        for name in self.shape.names:
            self._slurmd(name)
        self._wait_idle(self.shape.names)

    def _slurmd(self, name: str) -> None:
        self._daemon(name, ["slurmd", "-D", "-N", name, "-f", self.environ["SLURM_CONF"]])

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [*self.enter, *command] if self.enter else [shutil.which(command[0], path=_PATH) or "", *command[1:]],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_idle(self, names: Sequence[str]) -> None:
        def idle() -> bool:
            rows = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False).stdout.split("\n")
            states = dict(row.split() for row in rows if row)
            return all(states.get(name) == "idle" for name in names)

        self._until(idle, f"idle nodes {', '.join(names)}")

    def _until(self, true: object, what: str) -> None:
        assert callable(true)
        deadline = time.monotonic() + START_TIMEOUT
        while not true():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"waited for {what}; ended: {ended}\n{self._logs()}")
            time.sleep(0.1)

    def _logs(self) -> str:
        files = [*self.folder.glob("*.out"), *self.folder.glob("*.log")]
        return "\n".join(f"{file.name}: {''.join(file.read_text().splitlines(True)[-8:])}" for file in files)


def main() -> int:
    """Start the small cluster, say how to use it, and end it with Ctrl-C or TERM."""
    reason = missing()
    if reason:
        print(reason, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    cluster = SlurmCluster()
    try:
        print(f"export SLURM_CONF={cluster.environ['SLURM_CONF']}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
