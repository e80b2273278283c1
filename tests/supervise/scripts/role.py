"""A role for tests: says that it runs, then does what its arguments say.

role.py serve                 listen on a port until it is ended
role.py finish SECONDS        exit 0 after SECONDS; trainer 0 writes metrics of 3 steps, the generator that it is done
role.py fail SECONDS CODE     exit CODE
role.py stubborn              as serve, and ignore TERM
role.py daemon                as serve, with a grandchild in a session of its own that listens on another port
role.py pipe SECONDS CODE     exit CODE from a shell pipeline
role.py export STEPS          write an export of that step (rank 0), exit 0
role.py until FILE            as serve, then exit 0 once FILE is in the run's folder
role.py flood MEGABYTES       print so much without an end of line, exit 1
role.py fill                  fill the disk of the run, exit 1
role.py follow FILE           exit 1 a moment after the process whose pid is in FILE is gone
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

RUN = Path(os.environ["VIME_RUN_DIR"])
NAME = f"{os.environ['VIME_ROLE']}-{os.environ['VIME_RANK']}"


def report(name: str, port: int) -> None:
    folder = RUN / "seen"
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{name}"
    temporary.write_text(json.dumps({"pid": os.getpid(), "port": port, "environ": dict(os.environ)}))
    temporary.rename(folder / name)


def listen() -> socket.socket:
    return socket.create_server((os.environ["VIME_HOST"], 0))


def serve(name: str) -> None:
    server = listen()
    report(name, server.getsockname()[1])
    print(f"{name} serves", flush=True)
    time.sleep(600)


def say_done() -> None:
    """A generator's exit 0 counts only after it has said that its work is done."""
    if NAME == "generator-0":
        event = {"event": "stopped", "role": "generator", "attempt": int(os.environ["VIME_ATTEMPT"])}
        with (RUN / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")


def main(what: str, arguments: list[str]) -> int:
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve(NAME)
    elif what == "daemon":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                serve(f"{NAME}-daemon")
            os._exit(0)
        os.wait()
        serve(NAME)
    elif what == "serve":
        serve(NAME)
    elif what == "until":
        report(NAME, 0)
        while not (RUN / arguments[0]).exists():
            time.sleep(0.02)
        say_done()
    elif what == "flood":
        report(NAME, 0)
        for _ in range(int(arguments[0])):
            os.write(1, b"x" * (1 << 20))
        return 1
    elif what == "fill":
        report(NAME, 0)
        filler = os.open(RUN / "filler", os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(filler, bytes(4096))
        except OSError as full:
            os.write(1, str(full).encode())  # which the log on that disk cannot hold
    elif what == "follow":
        report(NAME, 0)
        followed = RUN / "seen" / arguments[0]
        while not followed.exists():
            time.sleep(0.01)
        pid = json.loads(followed.read_text())["pid"]
        # Ended but not collected yet counts: a broken connection is noticed that early.
        while Path(f"/proc/{pid}").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.001)
        print("connection reset by peer", flush=True)
        return 1
    elif what == "export":
        report(NAME, 0)
        time.sleep(0.5)
        if NAME == "trainer-0":
            (RUN / "export" / f"step_{arguments[0]}").mkdir(parents=True)
            (RUN / "export" / f"step_{arguments[0]}" / "weights").write_text(os.environ["VIME_MODEL"])
        say_done()
    elif what == "pipe":
        report(NAME, 0)
        script = f"(sleep {arguments[0]}; echo broken engine; exit {arguments[1]}) | cat"
        return subprocess.run(["bash", "-o", "pipefail", "-c", script], check=False).returncode
    else:
        report(NAME, 0)
        if what == "finish" and NAME == "trainer-0":
            with (RUN / "metrics.jsonl").open("a") as file:
                for step in (1, 2, 3):
                    file.write(json.dumps({"step": step}) + "\n")
        time.sleep(float(arguments[0]))
        if what == "finish":
            say_done()
        for line in range(60):
            print(f"line {line}", flush=True)
        return int(arguments[1]) if what == "fail" else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
