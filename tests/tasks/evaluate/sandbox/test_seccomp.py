"""The filter, interpreted here: what is allowed, what fails and how."""

from __future__ import annotations

import errno

import pytest

from windlass.tasks.evaluate.sandbox.seccomp import ALLOWED, CLONE, CLONE3, CLONE_THREAD, IOCTL, X32_BIT, build_filter, interpret

pytestmark = pytest.mark.pure

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
FILTER = build_filter()
DENIED = {
    "socket": 41, "connect": 42, "sendto": 44, "bind": 49, "listen": 50, "fork": 57, "vfork": 58, "execve": 59, "ptrace": 101, "symlink": 88,
    "link": 86, "chmod": 90, "chown": 92, "setuid": 105, "prctl": 157, "chroot": 161, "mount": 165, "umount2": 166, "reboot": 169, "pivot_root": 155,
    "init_module": 175, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "seccomp": 317, "memfd_create": 319, "bpf": 321, "execveat": 322, "userfaultfd": 323, "io_uring_setup": 425, "pidfd_open": 434,
}  # fmt: skip


def test_no_name_is_both_allowed_and_denied() -> None:
    assert not set(ALLOWED.values()) & {*DENIED.values(), CLONE, IOCTL, CLONE3} and len(set(ALLOWED.values())) == len(ALLOWED)


def test_what_python_needs_is_allowed() -> None:
    assert {interpret(FILTER, number) for number in ALLOWED.values()} == {ALLOW}


def test_everything_else_fails() -> None:
    for number in set(range(470)) - set(ALLOWED.values()):
        wanted = {IOCTL: errno.ENOTTY, CLONE3: errno.ENOSYS}.get(number, errno.EPERM)
        assert interpret(FILTER, number) == ERRNO | wanted


def test_threads_may_be_made_and_processes_may_not() -> None:
    assert interpret(FILTER, CLONE, CLONE_THREAD | 0x3D0F00) == ALLOW
    assert interpret(FILTER, CLONE, 0x01200011) == ERRNO | errno.EPERM  # fork's flags


def test_another_calling_convention_is_the_end() -> None:
    assert interpret(FILTER, 0, arch=0x40000003) == KILL  # i386, whose numbers mean other calls
    assert interpret(FILTER, X32_BIT | 0) == KILL
