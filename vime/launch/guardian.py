"""Where submitit looks for `Guard` in the pickles of jobs that were submitted before it moved to `vime.supervise`."""

from vime.supervise.guardian import Guard as Guard
