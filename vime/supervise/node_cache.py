"""Where compiled kernels are kept: a folder of the node, for libraries that would otherwise share one in $HOME.

Files that many nodes write on a network filesystem go stale under each other, and one rank's error hangs the job.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Variable -> its folder. One that the site sets, such as to a shared seed, stays."""


def node_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of CACHES that `environ` lacks, in a folder of this user on this node that only he can write."""
    folder = Path(tempfile.gettempdir()) / f"vime-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
        own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022
    except OSError:
        own = False
    if not own:  # someone else made it first: compiled code from there must not be run
        folder = Path(tempfile.mkdtemp(prefix="vime-cache-"))
    return {name: str(folder / part) for name, part in CACHES.items() if name not in environ}
