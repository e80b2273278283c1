"""What keeps a process that works on hostile text from doing harm: namespaces, a system-call filter, limits.

`isolate` is called once, by a process with one thread: it has no network, sees no other process and writes to no file
system from then on, where the kernel gives it namespaces of its own. `confine` is called in each worker: it cannot
write, open a connection, start or signal a process, nor take memory without end, and nothing of that can be undone. The
filter needs no privilege and no namespace, so a site that has switched namespaces off still has it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from pathlib import Path

MEMORY = 4 << 30
"""Bytes of address space of one worker."""
OPEN_FILES = 64

_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = {"user": 0x10000000, "mount": 0x00020000, "network": 0x40000000, "process": 0x20000000, "ipc": 0x08000000}
_MS_REC, _MS_PRIVATE, _MS_RDONLY = 0x4000, 1 << 18, 1
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CAPABILITY_VERSION = 0x20080522

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""AUDIT_ARCH_*, and which column of the numbers below is this machine's."""
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Network, and channels to other processes.
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "memfd_create": (319, 279), "io_uring_setup": (425, 425),
    # Other processes.
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    # Files.
    "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "truncate": (76, 45), "ftruncate": (77, 46),
    "fallocate": (285, 47), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "open_by_handle_at": (304, 265),
    # The kernel, and what this process may do.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "syslog": (103, 116),
    "personality": (135, 92),
}  # fmt: skip
_MISSING: dict[str, tuple[int, int]] = {"clone3": (435, 435), "openat2": (437, 437)}
"""Their arguments lie in memory, which a filter cannot read: with ENOSYS the C library takes the older call."""
_OPENS: dict[str, tuple[int | None, int | None, int]] = {"open": (2, None, 1), "openat": (257, 56, 2)}
"""With the place of the flags among the arguments."""
_CLONE, _PRLIMIT = (56, 220), (302, 261)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CLONE_THREAD = 0x10000

_LOAD, _EQUALS, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data. The low half of an argument comes first on both architectures."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def isolate(scratch: Path) -> list[str]:
    """Namespaces of its own for this process, and for its children one of processes. Returns the names of those it got.

    Every mount is read-only from then on but for `scratch`, which lies in memory, and /proc is empty. All or none: a
    kernel that refuses one refuses them all.
    """
    uid, gid = os.getuid(), os.getgid()
    if _LIBC.unshare(sum(_NAMESPACES.values())) != 0:
        return []
    # Without these three lines it is nobody, who cannot read its own user's files.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    _LIBC.mount(b"tmpfs", b"/proc", b"tmpfs", ctypes.c_ulong(_MS_RDONLY), b"size=4k")
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    _LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
    _LIBC.mount(b"tmpfs", os.fsencode(scratch), b"tmpfs", ctypes.c_ulong(0), b"size=16m,mode=700")
    os.chdir(scratch)  # what was there before lies below
    return list(_NAMESPACES)


def filtered() -> bool:
    """Whether this machine's system calls are known, so that `confine` filters them."""
    return platform.machine() in _ARCHITECTURES


def confine() -> None:
    """Gives up, for good, all that a scorer does not need. Raises OSError when the kernel refuses."""
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
    ):
        hard = resource.getrlimit(limit)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (most, most))
    _LIBC.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), struct.pack("=IIIIII", 0, 0, 0, 0, 0, 0))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if filtered():
        code = filter_code(*_ARCHITECTURES[platform.machine()])
        program = _Program(len(code) // 8, code)
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


def filter_code(architecture: int, column: int) -> bytes:
    """The system-call filter in classic BPF: 8 bytes an instruction.

    Source: Linux, Documentation/userspace-api/seccomp_filter.rst.
    """
    refuse, allow = _instruction(_RETURN, _ERRNO | errno.EPERM), _instruction(_RETURN, _ALLOW)
    missing = _instruction(_RETURN, _ERRNO | errno.ENOSYS)
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUALS, architecture, 1, 0),
        refuse,  # a 32-bit call
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, 0x40000000, 0, 1),
        refuse,  # x32
    ]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            code += [_instruction(_EQUALS, number, 0, 1), refuse]
    for numbers in _MISSING.values():
        code += [_instruction(_EQUALS, numbers[column], 0, 1), missing]
    for *opens, place in _OPENS.values():
        number = opens[column]
        if number is not None:
            code += _argument(number, place, _instruction(_HAS_BITS, _WRITES, 0, 1), refuse, allow)
    code += _argument(_CLONE[column], 0, _instruction(_HAS_BITS, _CLONE_THREAD, 1, 0), refuse, allow)
    code += _argument(_PRLIMIT[column], 0, _instruction(_EQUALS, 0, 1, 0), refuse, allow)
    return b"".join([*code, allow])


def _argument(number: int, place: int, test: bytes, refuse: bytes, allow: bytes) -> list[bytes]:
    """For call `number`: look at an argument, and `refuse` unless `test` jumps over that."""
    return [
        _instruction(_EQUALS, number, 0, 4),
        _instruction(_LOAD, _ARGUMENTS + 8 * place),
        test,
        refuse,
        allow,
    ]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _prctl(option: int, *arguments: object) -> None:
    if _LIBC.prctl(option, *arguments, *[0] * (4 - len(arguments))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
