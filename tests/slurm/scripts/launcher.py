"""The real launcher with the test's supervisor: launcher.py CONFIG [--no-wait] [--resume RUN]."""

import sys
from pathlib import Path

from vime.config.compose import load_resolved
from vime.errors import UserError
from vime.launch.submit import resume, submit
from vime.plan.plan import make_plan

if __name__ == "__main__":
    supervisor = (sys.executable, str(Path(__file__).with_name("supervisor.py")))
    wait = "--no-wait" not in sys.argv
    try:
        if "--resume" in sys.argv:
            path = Path(sys.argv[sys.argv.index("--resume") + 1])
            sys.exit(resume(path, [], wait=wait, supervisor=supervisor))
        config = load_resolved(Path(sys.argv[1]))
        sys.exit(submit(config, make_plan(config), wait=wait, supervisor=supervisor))
    except UserError as error:
        print(f"error: {error}", flush=True)
        sys.exit(2)
