"""A trainer for tests: `role.py train [--never-save]`.

In the first attempt it waits in its inbox for the request to stop, writes a complete checkpoint and exits 0. In a later
one it finds that checkpoint and exits 0 after a moment.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # this checkout's vime, whichever is installed

from tests.supervise.job import leave_checkpoint
from vime.buffer.control import Control, StopMessage
from vime.run.directory import RunDir
from vime.run.role import Role

RUN = Path(os.environ["VIME_RUN_DIR"])


def report(role: Role) -> None:
    folder = RUN / "seen"
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{role.name}-{role.rank}"
    temporary.write_text(json.dumps({"pid": os.getpid(), "port": 0, "environ": dict(os.environ)}))
    temporary.rename(folder / f"{role.name}-{role.rank}")


def main(arguments: list[str]) -> int:
    role = Role.from_environment()
    marker = RUN / "checkpoints" / "step_3" / "complete"
    if marker.exists():
        print(f"attempt {role.attempt} goes on after step 3", flush=True)
        time.sleep(1)
        return 0
    control = Control.connect(role, 60)
    report(role)
    if role.rank == 0:
        message = control.next_message(0, 600, "a request to stop")
        assert isinstance(message, StopMessage)
        assert message.save
        if "--never-save" in arguments:
            time.sleep(600)
        time.sleep(1)  # saving
        leave_checkpoint(RunDir(RUN), 3)
        with (RUN / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3}\n')
        return 0
    while not marker.exists():
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
