"""The engine role: runs one vLLM server, tells the run where it answers, and starts it again when it dies.

A restarted server holds the initial weights. It comes up behind a closed gate (see `vime.rollout.auth`): the router
does not admit it until the trainer, asked through its inbox, has sent it the current version.
"""

from __future__ import annotations

import signal
import sys
import time

from vime.buffer.control import Control, EngineAddress, EngineMessage
from vime.compose import load_resolved
from vime.config import Config
from vime.errors import UserError
from vime.role import Role, become_subreaper, die_with_parent
from vime.rollout.limits import read_limits
from vime.rollout.port import ReservedPort, reserve_port
from vime.rollout.server import Server, server_command, server_environment
from vime.run_dir import RunDir

POLL_SECONDS = 0.2


class Stop:
    """Whether this process was asked to end."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True

    def __call__(self) -> bool:
        return self.asked


def run_engine(role: Role, config: Config) -> int:
    """Serves until asked to stop (returns 0) or until the restarts are used up (returns the server's exit code)."""
    stop = Stop()
    run_dir = RunDir(role.run_dir)
    address = reserve_port(role.host)
    limits = read_limits(config.rollout, role.model)
    command = server_command(config, role.model, address, role.rank, limits.context)
    control = Control.connect(role, config.cluster.startup_timeout)
    run_dir.append_event(role, "started", command=command[1:])
    incarnation = 0
    while True:
        code, served = _run_server(role, config, control, run_dir, address, command, incarnation, stop)
        if stop.asked:
            run_dir.append_event(role, "stopped")
            return 0
        if incarnation == 0 and not served:
            print(f"the vLLM server ended with {code} before it ever answered: its reason is above", flush=True)
            return code
        incarnation += 1
        if incarnation > config.rollout.max_restarts:
            print(
                f"the vLLM server ended with {code}; rollout.max_restarts={config.rollout.max_restarts} are used up",
                flush=True,
            )
            return code
        run_dir.append_event(role, "restarted", incarnation=incarnation, exit_code=code)


def _run_server(
    role: Role,
    config: Config,
    control: Control,
    run_dir: RunDir,
    address: ReservedPort,
    command: list[str],
    incarnation: int,
    stop: Stop,
) -> tuple[int, bool]:
    """Runs one server to its end.

    Returns its exit code as a shell would say it, never 0, and whether it ever answered.
    """
    begun = time.monotonic()
    server = Server.start(command, server_environment(config, address.host, gated=incarnation > 0), address)
    served = False
    try:
        served = server.wait_ready(config.cluster.startup_timeout, stop)
        if served:
            _announce(role, config, control, address, incarnation)
            seconds = round(time.monotonic() - begun, 3)
            run_dir.append_event(role, "ready", url=address.url, incarnation=incarnation, seconds=seconds)
        while server.process.poll() is None and not stop.asked:
            time.sleep(POLL_SECONDS)
    finally:
        ended = server.process.poll()
        server.kill_tree(config.cluster.stop_timeout * 0.6)
    code = ended or 1
    return (128 - code if code < 0 else code), served


def _announce(role: Role, config: Config, control: Control, address: ReservedPort, incarnation: int) -> None:
    width = config.rollout.tensor_parallel
    control.publish_engine(EngineAddress(index=role.rank, url=address.url, world_size=width, incarnation=incarnation))
    if incarnation > 0:
        control.post(EngineMessage(index=role.rank, incarnation=incarnation))


def main() -> int:
    """Entry point of the role."""
    die_with_parent()
    become_subreaper()
    role = Role.from_environment()
    try:
        return run_engine(role, load_resolved(RunDir(role.run_dir).config))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
