"""The router role where the kernel refuses to lock its ports: `python -m tests.rollout.router.unlocked`."""

import errno
import sys

from vime.rollout.router import router


def refuse(pid: int, key: bytes) -> set[int]:
    raise OSError(errno.EPERM, "pidfd_getfd: Operation not permitted")


if __name__ == "__main__":
    router.lock_ports = refuse
    sys.exit(router.main())
