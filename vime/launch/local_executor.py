"""submitit's local executor, detached from the terminal: the run outlives the launcher unless the launcher ends it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

from vime.run.directory import RunDir
from vime.run.files import write_atomic
from vime.slurm.environment import submission_environment

_TEN_YEARS_S = 10 * 365 * 24 * 3600


class DetachedLocalExecutor(LocalExecutor):
    """Submits one job of one run.

    submitit's own starts the job in the launcher's session, with its terminal and its whole environment: Ctrl-C would
    kill the guardian within a second, `launch.py --no-wait | cat` would not end before the run, and two minutes would
    be the time limit.
    """

    def __init__(self, run: RunDir) -> None:
        super().__init__(folder=run.submitit)
        self._run = run

    def _submit_command(self, command: str) -> LocalJob[Any]:
        settings = {
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(_TEN_YEARS_S),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
        }
        argv = [sys.executable, "-m", "submitit.local._local", str(self.folder)]
        write_atomic(self._run.submission, _script(settings, argv))
        with (Path(self.folder) / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                argv,
                env=submission_environment(os.environ) | settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalJob(folder=self.folder, job_id=str(process.pid), tasks=[0], process=process)


def _script(settings: dict[str, str], argv: list[str]) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
    return f"#!/bin/sh\n{exports}exec {shlex.join(argv)}\n"
