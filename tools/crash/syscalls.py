"""Stop a process at its system calls, from outside: let each through, make it fail, or kill the process instead.

A seccomp filter in the watched process hands every file-changing system call to whoever holds the listener, before the
kernel carries it out. No debugger, no strace, no privileges; Linux on x86-64. Calls made through io_uring and stores
into mapped files are not seen; nothing here writes that way.
"""

import ctypes
import fcntl
import os
import platform
import struct
import sys
from dataclasses import dataclass

_DESCRIPTOR = {
    "write": (1, 0),
    "close": (3, 0),
    "pwrite64": (18, 0),
    "writev": (20, 0),
    "sendfile": (40, 0),
    "fsync": (74, 0),
    "fdatasync": (75, 0),
    "ftruncate": (77, 0),
    "fchmod": (91, 0),
    "sync_file_range": (277, 0),
    "fallocate": (285, 0),
    "pwritev": (296, 0),
    "syncfs": (306, 0),
    "copy_file_range": (326, 2),
    "pwritev2": (328, 0),
}
"""Calls on a descriptor: (number on x86-64, which argument it is)."""
_PATH = {
    "open": (2, None, 0),
    "truncate": (76, None, 0),
    "rename": (82, None, 1),
    "mkdir": (83, None, 0),
    "rmdir": (84, None, 0),
    "creat": (85, None, 0),
    "link": (86, None, 1),
    "unlink": (87, None, 0),
    "symlink": (88, None, 1),
    "chmod": (90, None, 0),
    "openat": (257, 0, 1),
    "mkdirat": (258, 0, 1),
    "unlinkat": (263, 0, 1),
    "renameat": (264, 2, 3),
    "linkat": (265, 2, 3),
    "symlinkat": (266, 1, 2),
    "fchmodat": (268, 0, 1),
    "renameat2": (316, 2, 3),
}
"""Calls on a path: (number, the argument with its directory's descriptor, the argument with the path). Of two paths the
one that comes to be."""
NAMES = {entry[0]: name for table in (_DESCRIPTOR, _PATH) for name, entry in table.items()}
_FLAGS_ARGUMENT = {"open": 1, "openat": 2}

_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, _NO_NEW_PRIVS = 317, 1, 8, 38
_ARCH, _ALLOW, _NOTIFY = 0xC000003E, 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _GO_ON = 0xC0502100, 0xC0182101, 1
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that is about to happen: its name and the path that it concerns. *changes*: it can change a file or
    a directory (an ``open`` that creates or truncates, a ``close`` of a file open for writing)."""

    name: str
    path: str
    changes: bool

    def __str__(self) -> str:
        return f"{self.name}({self.path})"


def unsupported() -> str | None:
    """Why calls cannot be stopped on this machine, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"seccomp listeners are used on Linux x86-64 only, this is {sys.platform} on {platform.machine()}"
    pid = os.fork()
    if pid == 0:
        try:
            listen()
        except OSError:
            os._exit(1)
        os._exit(0)
    return "this kernel or container allows no seccomp listener" if os.waitpid(pid, 0)[1] else None


def listen() -> int:
    """Hand this thread's, and its later threads', calls to the holder of the descriptor that is returned."""
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = sorted(NAMES)
    # A program of BPF: (operation, jump if true, jump if false, operand). Calls of another architecture are allowed.
    load_architecture = (0x20, 0, 0, 4)
    compare_architecture = (0x15, 0, len(numbers) + 1, _ARCH)
    load_number = (0x20, 0, 0, 0)
    program = [load_architecture, compare_architecture, load_number]
    for index, number in enumerate(numbers):
        program.append((0x15, len(numbers) - index, 0, number))
    program += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _NOTIFY)]
    instructions = [struct.pack("=HBBI", *line) for line in program]
    code = ctypes.create_string_buffer(b"".join(instructions))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    descriptor: int = libc.syscall(_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, header)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "seccomp listener")
    return descriptor


class Stopped:
    def __init__(self, listener: int) -> None:
        buffer = bytearray(80)
        fcntl.ioctl(listener, _RECEIVE, buffer, True)
        self._listener = listener
        self._id, self._thread, _, self._number, _, _, *self._arguments = struct.unpack(
            "=QIIiIQ6Q", buffer
        )

    def let_through(self) -> None:
        self._answer(0, _GO_ON)

    def fail(self, number: int) -> None:
        """Return the error *number* (an errno); the call is not carried out."""
        self._answer(-number, 0)

    def _answer(self, error: int, flags: int) -> None:
        try:
            fcntl.ioctl(self._listener, _SEND, struct.pack("=QqiI", self._id, 0, error, flags))
        except FileNotFoundError:  # the process was killed meanwhile
            return

    def below(self, root: str) -> Call | None:
        """The call, where it concerns something in the directory *root*."""
        name = NAMES[self._number]
        try:
            path = self._path(name)
            if path != root and not path.startswith(root + "/"):
                return None
            return Call(name, path, self._changes(name))
        except OSError:
            return None

    def _path(self, name: str) -> str:
        if name in _DESCRIPTOR:
            return os.readlink(f"/proc/{self._thread}/fd/{self._arguments[_DESCRIPTOR[name][1]]}")
        _, directory, path = _PATH[name]
        given = os.fsdecode(self._text(self._arguments[path]))
        if not given.startswith("/"):
            given = os.path.join(self._directory(directory), given)
        return os.path.normpath(given)

    def _directory(self, argument: int | None) -> str:
        descriptor = _AT_FDCWD
        if argument is not None:
            descriptor = ctypes.c_int(self._arguments[argument] & 0xFFFFFFFF).value
        name = "cwd" if descriptor == _AT_FDCWD else f"fd/{descriptor}"
        return os.readlink(f"/proc/{self._thread}/{name}")

    def _text(self, address: int) -> bytes:
        memory = os.open(f"/proc/{self._thread}/mem", os.O_RDONLY)
        try:
            return os.pread(memory, 4096, address).split(b"\0", 1)[0]
        finally:
            os.close(memory)

    def _changes(self, name: str) -> bool:
        if name in _FLAGS_ARGUMENT:
            flags = self._arguments[_FLAGS_ARGUMENT[name]]
            return bool(flags & (os.O_CREAT | os.O_TRUNC))
        if name == "close":
            flags = self._flags_of(self._arguments[0])
            return bool(flags & (os.O_WRONLY | os.O_RDWR))
        return True

    def _flags_of(self, descriptor: int) -> int:
        """The flags with which the calling thread has opened a file."""
        with open(f"/proc/{self._thread}/fdinfo/{descriptor}") as file:
            for line in file:
                if line.startswith("flags:"):
                    return int(line.split()[1], 8)
        raise ValueError(f"descriptor {descriptor} has no flags")
