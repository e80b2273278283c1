"""The real launcher with the test's supervisor: launcher.py CONFIG [--no-wait]."""

import sys
from pathlib import Path

from vime.config.compose import load_resolved
from vime.launch.submit import submit
from vime.plan.plan import make_plan

if __name__ == "__main__":
    config = load_resolved(Path(sys.argv[1]))
    supervisor = (sys.executable, str(Path(__file__).with_name("supervisor.py")))
    sys.exit(submit(config, make_plan(config), wait="--no-wait" not in sys.argv, supervisor=supervisor))
