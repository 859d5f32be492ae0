"""The system calls that a generated program may make, as a BPF filter. Pure: numbers in, bytes out.

An allow-list: what is not named fails with EPERM, as if the kernel had no such call for us. There are no sockets, no new processes, no exec,
no tracing, no mounting, no keys. Numbers: arch/x86/entry/syscalls/syscall_64.tbl of Linux.
"""

from __future__ import annotations

import errno
import struct

AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
CLONE_THREAD = 0x00010000

ALLOWED = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10,
    "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "pwrite64": 18, "readv": 19,
    "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34,
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "exit": 60, "wait4": 61, "kill": 62, "uname": 63, "fcntl": 72,
    "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83,
    "rmdir": 84, "creat": 85, "unlink": 87, "readlink": 89, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "sigaltstack": 131, "statfs": 137,
    "fstatfs": 138, "sched_getparam": 143, "sched_getscheduler": 145, "arch_prctl": 158, "gettid": 186, "time": 201, "futex": 202,
    "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "tgkill": 234, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263,
    "renameat": 264, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271, "set_robust_list": 273, "epoll_pwait": 281,
    "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "prlimit64": 302, "renameat2": 316,
    "getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334, "faccessat2": 439,
}  # fmt: skip
CLONE, IOCTL, CLONE3 = 56, 16, 435

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_JMP|JSET|K, BPF_RET|K (linux/bpf_common.h)."""
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
"""struct seccomp_data."""


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _fail(number: int) -> bytes:
    return _step(_RETURN, _ERRNO | number)


def build_filter() -> bytes:
    """For x86-64; threads may be made, processes may not."""
    steps = [
        _step(_LOAD, _ARCH_AT), _step(_EQUAL, AUDIT_ARCH_X86_64, 1, 0), _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT), _step(_AT_LEAST, X32_BIT, 0, 1), _step(_RETURN, _KILL),
        # glibc asks for clone3 first, whose flags lie in memory where a filter cannot look; it then takes clone.
        _step(_EQUAL, CLONE3, 0, 1), _fail(errno.ENOSYS),
        _step(_EQUAL, IOCTL, 0, 1), _fail(errno.ENOTTY),
    ]  # fmt: skip
    for number in sorted(ALLOWED.values()):
        steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    steps += [
        _step(_EQUAL, CLONE, 1, 0), _fail(errno.EPERM),
        _step(_LOAD, _FIRST_ARGUMENT_AT), _step(_ANY_BIT, CLONE_THREAD, 0, 1), _step(_RETURN, _ALLOW),
        _fail(errno.EPERM),
    ]  # fmt: skip
    return b"".join(steps)


def interpret(program: bytes, number: int, first_argument: int = 0, arch: int = AUDIT_ARCH_X86_64) -> int:
    """What the filter returns for a call; for tests, on machines whose kernel takes no filter too."""
    steps = [struct.unpack_from("HBBI", program, place) for place in range(0, len(program), 8)]
    data = {_NUMBER_AT: number, _ARCH_AT: arch, _FIRST_ARGUMENT_AT: first_argument}
    place, value = 0, 0
    while True:
        code, if_true, if_false, constant = steps[place]
        if code == _RETURN:
            return constant
        if code == _LOAD:
            value, jump = data[constant], 0
        else:
            holds = {_EQUAL: value == constant, _AT_LEAST: value >= constant, _ANY_BIT: bool(value & constant)}[code]
            jump = if_true if holds else if_false
        place += 1 + jump
