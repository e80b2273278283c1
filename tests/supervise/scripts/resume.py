"""`launch.py --resume RUN --no-wait` with the test's supervisor: resume.py RUN."""

import sys
from pathlib import Path

from vime.launch.submit import resume

if __name__ == "__main__":
    supervisor = (sys.executable, str(Path(__file__).with_name("supervisor.py")))
    sys.exit(resume(Path(sys.argv[1]), [], wait=False, supervisor=supervisor))
