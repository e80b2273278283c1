"""Debian trixie's Slurm 24.11 in a folder of its own: a scheduler that knows NVLink domains.

The folder is made once, by debootstrap (about a minute, 300 MB), under VIME_CACHE, and kept.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vime.config.compose import ROOT

RELEASE = "trixie"
PACKAGES = ("slurm-wlm", "munge", "procps", "libffi8", "libsqlite3-0", "libgomp1")
"""Slurm, and the libraries that this machine's Python takes from its system."""
KERNEL = ("/proc", "/sys", "/dev")
LONGEST = 900.0
"""Seconds that making the folder may take."""


class NoTrixie(Exception):
    """Why there can be no Slurm 24.11 here."""


def root() -> Path:
    """The folder to chroot into, made if it is missing, with what a job needs of this machine. Raises NoTrixie."""
    if os.geteuid() != 0:
        raise NoTrixie("only root can chroot")
    cache = Path(os.environ.get("VIME_CACHE") or Path.home() / ".cache" / "vime")
    folder = cache / f"slurm-{RELEASE}"
    if not folder.is_dir():
        _make(folder)
    for source in _shared():
        target = folder / source.removeprefix("/")
        target.mkdir(parents=True, exist_ok=True)
        if not target.is_mount():
            bind = "--rbind" if source in KERNEL else "--bind"
            done = subprocess.run(["mount", bind, source, str(target)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoTrixie(f"cannot mount {target}: {done.stderr.strip()}")
            subprocess.run(["mount", "--make-rslave", str(target)], capture_output=True, check=False)
    return folder


def release_mounts(folder: Path) -> None:
    """Take this machine's folders out again, so that removing the folder cannot reach them."""
    for source in reversed(_shared()):
        target = str(folder / source.removeprefix("/"))
        subprocess.run(["umount", "--recursive", "--lazy", target], capture_output=True, check=False)


def _mirror() -> str:
    """Where this machine's apt has Debian from. Raises NoTrixie when it has none."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    for address in listed:
        if address.rstrip("/").endswith("/debian"):
            return address.rstrip("/")
    raise NoTrixie("apt has no Debian mirror to take trixie from")


def _shared() -> list[str]:
    """Folders of this machine that a job needs: the kernel's, the tests' own, the checkout and its Python."""
    own = [tempfile.gettempdir(), str(ROOT), sys.prefix, sys.base_prefix]
    return [*KERNEL, *(path for path in dict.fromkeys(own) if not path.startswith("/usr"))]


def _make(folder: Path) -> None:
    if shutil.which("debootstrap") is None:
        _run("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "debootstrap")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Complete by its name: an interrupted one is never taken for the whole.
    with tempfile.TemporaryDirectory(prefix="slurm-", dir=folder.parent) as unfinished:
        made = Path(unfinished) / RELEASE
        _run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", RELEASE, str(made), _mirror())
        made.rename(folder)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoTrixie(f"{command[0]}: {error}") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise NoTrixie(f"{' '.join(command[:2])} failed: {last[0]}")
