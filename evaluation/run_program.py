"""Run one Python program from stdin to its end, within limits and, if asked to, walled off by the kernel.

`run_code.py` starts this file and nothing imports it. Its stdin holds a line with the size of the program in bytes,
the program, and a key. The key stays in the pipe until the program has ended without an exception; then it is written
to stdout, so that neither `sys.exit(0)` before the tests nor `os._exit(0)` passes for success.
"""

import ctypes
import os
import resource
import signal
import sys
import types
from contextlib import suppress


# From the headers of Linux; the numbers of these system calls are the same on all its architectures.
CLONE_NEW = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MNT_DETACH = 442, -100, 0x8000, 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, CAPABILITY_VERSION = 1, 38, 0x20080522

LIBRARIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
NO_WALL = 125  # exit status of the process that could not wall itself off
PROCESSES = 32  # of a walled-off program, threads included; Linux does not count those of root


def call(name: str, *arguments) -> None:
    """Call a function of the C library that returns 0. Raise `OSError`."""
    arguments = [a.encode() if isinstance(a, str) else a for a in arguments]
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def leave_namespaces() -> None:
    """Leave the caller's mounts, processes, network, host name, System V objects and user. Raise `OSError`."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEW)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def bind(path: str, root: str, attributes: int) -> None:
    """Show a file or directory, and what is mounted in it, at the same place below `root`. Raise `OSError`."""
    target = root + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT))
    call("mount", path, target, None, MS_BIND | MS_REC, None)
    attribute = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attribute))
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, target, AT_RECURSIVE, attribute, size)


def enter(root: str) -> None:
    """Make `root` the root: an empty file system in memory. Raise `OSError`.

    It shows the interpreter, its packages and the system's libraries, all read-only.
    """
    call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    call("mount", "tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=755")
    shown: list[str] = []
    for path in (*LIBRARIES, *sorted({sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix})):
        if os.path.exists(path) and not any(path == other or path.startswith(f"{other}/") for other in shown):
            bind(path, root, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
            shown.append(path)
    for path in DEVICES:
        bind(path, root, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    directory = "/tmp/run-code"  # /tmp may hold the interpreter
    for name in ("proc", directory.lstrip("/"), "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    # Read-only: to the settings of the kernel, root is root in any namespace.
    call("mount", "proc", f"{root}/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    os.chdir(root)
    call("pivot_root", ".", ".")
    call("umount2", ".", MNT_DETACH)
    os.chdir(directory)


def drop_privileges() -> None:
    """Give up, for good, what the owner of the namespaces may do in them. Raise `OSError`."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())


def wall_off(root: str) -> None:
    """Go on in a new process that sees nothing of the caller's files, processes and network.

    `root` is an empty directory, and stays empty. With the first process of its own tree all others die. Exit with
    `NO_WALL` where the system refuses.
    """
    try:
        leave_namespaces()
        if (first := os.fork()) != 0:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        enter(root)
        if (program := os.fork()) != 0:
            os.waitpid(program, 0)
            os._exit(0)
        drop_privileges()
    except (OSError, AttributeError):
        os._exit(NO_WALL)


def main(parent: str, wall: str, root: str, cpu_seconds: str, memory_bytes: str, file_bytes: str) -> None:
    with suppress(AttributeError):  # of Linux alone
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it was killed before
        os._exit(1)
    key, report = os.dup(0), os.dup(1)
    size = int(sys.stdin.buffer.raw.readline())
    program = b""
    while len(program) < size:
        program += os.read(key, size - len(program))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    walled_off = wall == "wall"
    if walled_off:
        wall_off(root)
    limits = {"CPU": cpu_seconds, "AS": memory_bytes, "FSIZE": file_bytes, "CORE": 0, "NOFILE": 64}
    for name, value in {**limits, "NPROC": PROCESSES if walled_off else 0}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
    # The program finds itself as `__main__`, not this file.
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    try:
        exec(compile(program.decode(), "program.py", "exec"), module.__dict__)
    except BaseException:
        os._exit(1)
    os.write(report, os.read(key, 64))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
