"""The engine role: runs one vLLM server, tells the run where it answers, and starts it again when it dies.

A restarted server holds the initial weights. It comes up behind a closed gate (see `auth`): the router does not admit
it until the trainer, asked through its inbox, has sent it the current version.

An engine that spans nodes is a process of this role on each of them (see `multinode`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

from vime.buffer.control import Control, EngineAddress, EngineMessage
from vime.config import Config
from vime.config.compose import load_resolved
from vime.errors import UserError, WaitTimeout
from vime.rollout.engine.multinode import POLL_SECONDS, EngineNodes, NodeEnd
from vime.rollout.engine.server import Server, headless_command, server_command, server_environment, span_flags
from vime.rollout.limits import read_limits
from vime.run.directory import RunDir
from vime.run.network import ReservedPort, check_temporary_folder, reserve_port
from vime.run.role import Role, become_subreaper, die_with_parent


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


@dataclass(frozen=True)
class Engine:
    """This process's node of one engine, through all its restarts."""

    role: Role
    config: Config
    control: Control
    run_dir: RunDir
    index: int
    """Which engine."""
    nodes: EngineNodes
    address: ReservedPort | None
    """Where the server answers: with node 0 only."""
    command: list[str]
    stop: Stop

    def run(self) -> int:
        """Serves until asked to stop (returns 0) or until the restarts are used up (returns vLLM's exit code)."""
        # A report waits for each role that has started to become ready; further nodes have no server of their own.
        event = "started" if self.nodes.node == 0 else "part_started"
        self.run_dir.append_event(self.role, event, engine=self.index, command=self.command[1:])
        incarnation = 0
        while True:
            end = self._run_once(incarnation)
            if end is None:
                self.run_dir.append_event(self.role, "stopped")
                return 0
            reason = ""
            if incarnation == 0 and self.control.try_get(f"engine/{self.index}") is None:
                reason = "before it ever answered: its reason is above"
            elif incarnation == self.config.rollout.max_restarts:
                reason = f"; rollout.max_restarts={incarnation} are used up"
            if reason:
                return self._give_up(end, reason)
            incarnation += 1
            if self.nodes.node == 0:
                what = {"engine": self.index, "part": end.node, "exit_code": end.exit_code}
                self.run_dir.append_event(self.role, "restarted", incarnation=incarnation, **what)

    def _run_once(self, incarnation: int) -> NodeEnd | None:
        """Runs vLLM to its end. Returns which node of the engine ended by itself, or None when asked to stop."""
        begun = time.monotonic()
        timeout, grace = self.config.cluster.startup_timeout, self.config.cluster.stop_timeout * 0.6
        rendezvous = self.nodes.rendezvous(incarnation, timeout, self.stop)
        if self.stop.asked:
            return None
        server = Server.start(
            [*self.command, *span_flags(self.nodes, rendezvous)],
            server_environment(self.config, self.role.host, self.role.token, self.index, gated=incarnation > 0),
            "" if self.address is None else self.address.url,
        )

        def over() -> bool:
            return self.stop.asked or self.nodes.ended_elsewhere(incarnation)

        try:
            if self.address is not None and server.wait_ready(timeout, over):
                self._announce(self.address, incarnation, time.monotonic() - begun)
            while server.process.poll() is None and not over():
                time.sleep(POLL_SECONDS)
            code = server.process.poll()
            if code is not None and not self.stop.asked:
                self.nodes.report_end(incarnation, 128 - code if code < 0 else code or 1)
        finally:
            server.kill_tree(grace)
        self.nodes.confirm_stopped(incarnation)
        return None if self.stop.asked else self.nodes.end(incarnation)

    def _announce(self, address: ReservedPort, incarnation: int, seconds: float) -> None:
        width = self.config.rollout.tensor_parallel
        self.control.publish_engine(
            EngineAddress(index=self.index, url=address.url, world_size=width, incarnation=incarnation)
        )
        if incarnation > 0:
            self.control.post(EngineMessage(index=self.index, incarnation=incarnation))
        self.run_dir.append_event(
            self.role, "ready", url=address.url, incarnation=incarnation, seconds=round(seconds, 3)
        )

    def _give_up(self, end: NodeEnd, reason: str) -> int:
        """The exit code, at once on the node that ended: its end is the failure, the others follow."""
        if end.node == self.nodes.node:
            print(f"vLLM ended with {end.exit_code}{'' if reason[0] == ';' else ' '}{reason}", flush=True)
            return end.exit_code
        print(f"node {end.node} of this engine ended with {end.exit_code}: waiting to be stopped", flush=True)
        timeout = self.config.cluster.startup_timeout
        deadline = time.monotonic() + timeout
        while not self.stop.asked:
            if time.monotonic() > deadline:
                raise WaitTimeout(f"waited {timeout:g} s for the supervisor to end what node {end.node} has left")
            time.sleep(POLL_SECONDS)
        self.run_dir.append_event(self.role, "stopped")
        return 0


def run_engine(role: Role, config: Config) -> int:
    """Runs this node's process of its engine to the end; returns the exit code."""
    check_temporary_folder({})
    stop = Stop()
    index, node = divmod(role.rank, config.nodes_per_engine)
    context = read_limits(config.rollout, role.model).context
    address = reserve_port(role.host) if node == 0 else None
    if address is None:
        command = headless_command(config, role.model, index, context)
    else:
        command = server_command(config, role.model, address, index, context)
    control = Control.connect(role, config.cluster.startup_timeout)
    nodes = EngineNodes(control, index, node, config.nodes_per_engine, role.host)
    return Engine(role, config, control, RunDir(role.run_dir), index, nodes, address, command, stop).run()


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
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is ended and said. Unloading torch can take longer than the supervisor waits before it kills.
    os._exit(code)
