"""The srun of one role as the supervisor sees it: which of its ranks ended, where and how, as soon as it happens."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from vime.run.directory import RunDir, utc_now
from vime.supervise.commands import Command
from vime.supervise.process_tree import signal_group
from vime.supervise.processes import End, collect, signal_name
from vime.supervise.step_rank import RankReport, read_report

_TASK = re.compile(r"srun: error: (?P<node>\S+): tasks? (?P<tasks>\[?\d[\d,\-]*\]?): Killed")
_NODE = re.compile(r"srun: error: Node failure on (?P<node>\S+)")


@dataclass
class StepProcess:
    """An srun. Its output holds the reports of its ranks' wrappers, and srun's own messages."""

    command: Command
    popen: subprocess.Popen[bytes]
    output: Path
    run: RunDir
    attempt: int
    _read: int = 0
    _ended: set[int] = field(default_factory=set)
    _nodes: dict[int, str] = field(default_factory=dict)
    told: dict[int, End] = field(default_factory=dict)
    """Of each rank that SLURM told to stop, the end that it will have."""

    def poll(self) -> tuple[list[End], bool]:
        """As `Running`: every rank that ended other than well, and, when srun has ended, the step as a whole."""
        ends = self._reports()
        code = collect(self.popen)
        if code is None:
            return ends, False
        ends += self._reports()
        if code == 0 and not self._ended:
            return [*ends, self._end(RankReport(0, self._nodes.get(0, ""), utc_now(), 0, True, 0), self.output)], True
        if not self._ended:
            # Refused by SLURM, or ended before any wrapper could say something: srun's messages are the log.
            name = signal_name(-code) if code < 0 else None
            report = RankReport(0, self._nodes.get(0, ""), utc_now(), 0, True, None if name else code, name)
            ends.append(self._end(report, self.output))
        return ends, True

    def ask_to_stop(self) -> None:
        """Nothing: the closed lifeline has asked the ranks already. A signal to srun would kill them at once."""

    def kill(self) -> None:
        """End the step: srun kills its tasks on every node when it is told to end."""
        signal_group(self.popen.pid, signal.SIGTERM)

    def _reports(self) -> list[End]:
        ends = []
        for line in self._new_lines():
            report = read_report(line)
            if report is None:
                ends += self._lost(line)
            elif report.told:
                print(f"{report.time} SLURM tells {self.command.role}-{report.rank} to stop", flush=True)
                log = self.run.log(self.command.role, report.rank, self.attempt)
                self.told[report.rank] = self._end(replace(report, signal="SIGTERM", stopped=True), log)
            elif not report.ended:
                self._nodes[report.rank] = report.node
                where = f"pid {report.pid} on {report.node}"
                print(f"{report.time} started {self.command.role}-{report.rank}: {where}", flush=True)
            elif report.exit_code != 0 or not self.command.finishes:
                self._ended.add(report.rank)
                ends.append(self._end(report, self.run.log(self.command.role, report.rank, self.attempt)))
        return ends

    def _end(self, report: RankReport, log: Path) -> End:
        return End(
            command=self.command,
            exit_code=report.exit_code,
            signal=report.signal,
            time=report.time,
            seconds=time.monotonic(),
            log=log,
            rank=report.rank,
            node=report.node,
            stopped=report.stopped,
        )

    def _lost(self, line: str) -> list[End]:
        """The ranks that srun says are gone although their wrappers did not report: killed, or their node is lost."""
        task, node = _TASK.match(line), _NODE.match(line)
        if task:
            there = [(rank, task["node"]) for rank in _ranks(task["tasks"])]
        elif node:
            there = [(rank, name) for rank, name in self._nodes.items() if name == node["node"]]
        else:
            return []
        ends = []
        for rank, name in there:
            if rank not in self._ended:
                # After another rank's end srun kills the rest of the step: then that is the cause. After a node's end
                # SLURM ends the job, and says so in a moment.
                stopped = bool(self._ended) or node is not None
                report = RankReport(rank, name, utc_now(), 0, True, None, "SIGKILL", stopped)
                log = self.run.log(self.command.role, rank, self.attempt)
                ends.append(self._end(report, self.output if node or not log.exists() else log))
        self._ended.update(rank for rank, _ in there)
        return ends

    def _new_lines(self) -> list[str]:
        with self.output.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole, newline, _ = data.rpartition(b"\n")
        self._read += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


def _ranks(text: str) -> list[int]:
    """0, 2 and 3 of `0,2-3`, as srun writes task numbers."""
    ranks: list[int] = []
    for span in text.strip("[]").split(","):
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks
