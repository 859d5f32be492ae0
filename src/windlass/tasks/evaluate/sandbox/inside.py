# ruff: noqa: PTH103, PTH112, PTH123, BLE001
# pyright: basic
# (pathlib and typing are not imported: each costs every program several milliseconds.)
"""Runs inside the sandbox, as a script of its own: `python -I -S inside.py FOLDER`. Imports nothing of Windlass, and little of the standard library.

Two processes. The *program* is the model's code: in namespaces of its own, behind a filter, with nothing but a socket. The *judge* holds the
tests and the secret; it starts the program first, and reads the tests only then, so the program's memory never held them. The judge asks
the program's functions over the socket and compares plain values: what comes back is decoded from JSON, so no object of the program
with an `__eq__` of its own reaches a test. Only the judge can say the secret, and it says it only after the last test. Whatever a program
raises is its verdict.
"""

import builtins
import ctypes
import json
import os
import signal
import socket
import struct
import symtable
import sys
import time

MAX_MESSAGE = 8 * 2**20
MAX_TEXT = 400
MAX_END_SECONDS = 1.0
NAMESPACES = {"mount": 0x00020000, "ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000, "uts": 0x04000000}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH, SYS_PIVOT_ROOT, SYS_CAPSET = 2, 155, 126
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
LIBC = ctypes.CDLL(None, use_errno=True)


class Missing(Exception):
    """A layer that this machine does not offer."""


def checked(layer, result):
    if result != 0:
        raise Missing(f"{layer}: {os.strerror(ctypes.get_errno())}")


# --- layers ----------------------------------------------------------------------------------------------------------


def enter_namespaces(uid, gid):
    checked("namespaces", LIBC.unshare(sum(NAMESPACES.values())))
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as stream:
                stream.write(text)
    except OSError as error:
        raise Missing(f"user namespace: {error.strerror}") from None


def mount(source, target, kind, flags, options=None):
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    data = None if options is None else options.encode()
    checked(f"mount of {target}", LIBC.mount(*encoded, ctypes.c_ulong(flags), data))


def empty_root(root, readable):
    """A tmpfs with the interpreter's folders, read-only, and a small /tmp; what was there before is let go."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    for path in readable:
        bind(path, root + path)
    os.makedirs(root + "/tmp", exist_ok=True)
    mount("tmpfs", root + "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=16m,nr_inodes=4k,mode=777")
    mount(None, root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(root)
    checked("pivot_root", LIBC.syscall(SYS_PIVOT_ROOT, b".", b"."))
    checked("umount", LIBC.umount2(b".", MNT_DETACH))
    os.chdir("/tmp")


def bind(source, target):
    os.makedirs(target, exist_ok=True)
    mount(source, target, None, MS_BIND | MS_REC)
    flags = os.statvfs(target).f_flag  # flags of the mount below may not be taken away
    kept = sum(
        value for bit, value in ((os.ST_NOEXEC, MS_NOEXEC), (os.ST_NOATIME, 1024), (os.ST_RELATIME, 1 << 21)) if flags & bit
    )
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)
    for hidden in ("site-packages", "dist-packages"):
        if os.path.isdir(f"{target}/{hidden}"):
            mount("tmpfs", f"{target}/{hidden}", "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k")


def limit(limits):
    import resource

    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def drop_capabilities():
    header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0)
    checked("capabilities", LIBC.syscall(SYS_CAPSET, header, data))
    checked("no_new_privs", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def apply_filter(steps):
    buffer = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("HxxxxxxP", len(steps) // 8, ctypes.addressof(buffer))
    checked("seccomp", LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


# --- messages --------------------------------------------------------------------------------------------------------


def read_exactly(descriptor, size):
    found = b""
    while len(found) < size:
        piece = os.read(descriptor, min(size - len(found), 2**20))
        if not piece:
            raise EOFError
        found += piece
    return found


def receive(descriptor):
    (size,) = struct.unpack(">I", read_exactly(descriptor, 4))
    if size > MAX_MESSAGE:
        raise ValueError("the program sent too much")
    return json.loads(read_exactly(descriptor, size))


def send(descriptor, message):
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE:
        body = json.dumps({"raised": ["ValueError", "the value is too large for the sandbox"]}).encode()
    view = memoryview(struct.pack(">I", len(body)) + body)
    while view:
        view = view[os.write(descriptor, view) :]


class Values:
    """Values to JSON and back. What is no plain value stays on its side, and its number crosses."""

    def __init__(self, wrap):
        self.objects, self._wrap = [], wrap

    def encode(self, value):
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return kind(value) if kind is not bool else value is True
        if value is None:
            return None
        for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "f")):
            if isinstance(value, kind):
                return {tag: [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"d": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, complex):
            return {"c": [value.real, value.imag]}
        if isinstance(value, (bytes, bytearray)):
            return {"b": bytes(value).hex()}
        if isinstance(value, range):
            return {"r": [value.start, value.stop, value.step]}
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"y": value.__name__}
        return {"o": self._number(value)}

    def _number(self, value):
        if isinstance(value, Remote):
            return [value._number]
        self.objects.append(value)
        return len(self.objects) - 1

    def decode(self, value):
        if not isinstance(value, dict):
            return value
        ((tag, content),) = value.items()
        if tag in SEQUENCES:
            return SEQUENCES[tag](self.decode(item) for item in content)
        if tag == "d":
            return {self.decode(key): self.decode(item) for key, item in content}
        if tag == "c":
            return complex(*content)
        if tag == "b":
            return bytes.fromhex(content)
        if tag == "r":
            return range(*content)
        if tag == "y":
            kind = getattr(builtins, content)
            return kind if isinstance(kind, type) else None
        return self.objects[content[0]] if isinstance(content, list) else self._wrap(content)


SEQUENCES = {"l": list, "t": tuple, "s": set, "f": frozenset}


# --- the program's side ----------------------------------------------------------------------------------------------


def describe(error):
    try:
        return [type(error).__name__, str(error)[:MAX_TEXT]]
    except BaseException:  # an exception whose text raises
        return [type(error).__name__, ""]


def serve_program(descriptor, source):
    """Runs the source, then answers the judge until it closes the socket."""
    space = {"__name__": "__answer__", "__builtins__": builtins}
    try:
        exec(compile(source, "<answer>", "exec"), space)
        send(
            descriptor,
            {"names": [name for name, value in space.items() if isinstance(name, str) and type(value) is not type(sys)]},
        )
    except BaseException as error:
        send(descriptor, {"raised": describe(error)})
        return
    values = Values(wrap=None)
    while True:
        asked = receive(descriptor)
        try:
            reply = {"value": values.encode(perform(asked, space, values))}
        except BaseException as error:
            reply = {"raised": describe(error)}
        send(descriptor, reply)


def perform(asked, space, values):
    target = space[asked["name"]] if "name" in asked else values.objects[asked["object"]]
    arguments = [values.decode(value) for value in asked.get("arguments", [])]
    named = {name: values.decode(value) for name, value in asked.get("named", {}).items()}
    match asked["do"]:
        case "call":
            return target(*arguments, **named)
        case "get":
            return getattr(target, *arguments)
        case "set":
            return setattr(target, *arguments)
        case "list":
            return list(target)
        case "value":
            return target


# --- the judge's side ------------------------------------------------------------------------------------------------


class Remote:
    """Something of the program's that is no plain value. Equal to nothing but itself, so it passes no test by its looks."""

    def __init__(self, ask, number):
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name):
        return self._ask({"do": "get", "object": self._number}, name)

    def __setattr__(self, name, value):
        self._ask({"do": "set", "object": self._number}, name, value)

    def __call__(self, *arguments, **named):
        return self._ask({"do": "call", "object": self._number}, *arguments, **named)

    def __iter__(self):
        return iter(self._ask({"do": "list", "object": self._number}))


class Gone(BaseException):
    """The program answers no more. No Exception, so that tests which expect one do not take it for the answer's."""


class Judge:
    def __init__(self, descriptor):
        self._descriptor, self._gone = descriptor, None
        self._values = Values(wrap=lambda number: Remote(self.ask, number))
        began = self._exchange(None)
        if "raised" in began:
            raise Wrong("the answer does not run: " + ": ".join(began["raised"]))
        self._names = frozenset(began["names"])

    def _exchange(self, message):
        """The program's reply. Once it is gone it stays so, whatever tests make of that."""
        if self._gone is None:
            try:
                if message is not None:
                    send(self._descriptor, message)
                return receive(self._descriptor)
            except (EOFError, OSError):
                self._gone = Gone()
            except ValueError as error:
                self._gone = Gone(str(error))
        raise self._gone

    def ask(self, message, *arguments, **named):
        encoded = [self._values.encode(value) for value in arguments]
        kept = {name: self._values.encode(value) for name, value in named.items()}
        reply = self._exchange({**message, "arguments": encoded, "named": kept})
        if "raised" in reply:
            name, text = reply["raised"]
            kind = getattr(builtins, name, None)
            is_plain = isinstance(kind, type) and issubclass(kind, Exception) and kind not in (StopIteration, AssertionError)
            raise kind(text) if is_plain and kind else RuntimeError(f"{name}: {text}")
        return self._values.decode(reply["value"])

    def named(self, name):
        """A function of the program by its name."""

        def call(*arguments, **named):
            return self.ask({"do": "call", "name": name}, *arguments, **named)

        call.__name__ = name
        return call

    def judge(self, tests, context, entry_point):
        space: dict[str, object] = {"__name__": "__tests__"}
        if context:
            exec(compile(context, "<context>", "exec"), space)
        wanted = {entry_point} if entry_point else wanted_names(tests, self._names)
        if not entry_point and not wanted & self._names:
            raise Wrong("the answer defines nothing that the tests call")
        for name in sorted(wanted):
            if name in self._names:
                space[name] = self.named(name)
            elif name in sys.stdlib_module_names:  # some tests rely on an import in the answer; they get the real one
                space[name] = __import__(name)
            elif entry_point:
                raise Wrong(f"the answer does not define {name}")
        try:
            exec(compile(tests, "<tests>", "exec"), space)
        except BaseException as error:
            if self._gone is None:
                raise Wrong(explain(error, tests)) from None
        if self._gone is not None:
            raise self._gone


class Wrong(Exception):
    pass


def wanted_names(source, defined):
    """What tests want of the answer: names that they do not bind and Python does not have.

    A function under test may be called `sum`; but only where tests want nothing else, or an answer could replace what they compare with.
    """
    free = free_names(source)
    needed = free - set(dir(builtins))
    return needed if needed & defined or needed - sys.stdlib_module_names else needed | free & defined


def free_names(source):
    """Names that are looked up in the module and not bound there. Parameters, and names of comprehensions, are none of them."""
    top = symtable.symtable(source, "<tests>", "exec")
    used, bound, tables = set(), set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top or symbol.is_global():
                used |= {symbol.get_name()} if symbol.is_referenced() else set()
                bound |= {symbol.get_name()} if symbol.is_assigned() or symbol.is_imported() else set()
    return used - bound


def explain(error, tests):
    """The line of the tests that failed."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            line = trace.tb_lineno
        trace = trace.tb_next
    lines = tests.splitlines()
    where = lines[line - 1].strip()[:MAX_TEXT] if 0 < line <= len(lines) else ""
    name, text = describe(error)
    said = "failed" if name == "AssertionError" and not text else f"{name}: {text}" if text else name
    return f"{said}: {where}" if where else said


# --- both ------------------------------------------------------------------------------------------------------------


def start_program(job, steps):
    """The program's process, and the judge's end of the socket. It is the first in its PID namespace: it sees no other process."""
    ours, theirs = socket.socketpair()
    nothing = os.open("/dev/null", os.O_RDWR) if job["null"] is None else job["null"]
    process = os.fork()
    if process:
        theirs.close()
        return process, ours.detach()
    try:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()  # `kill(0)` reaches all of a group, whatever namespace they are in
        kept = theirs.fileno()
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.dup2(kept, 3)
        os.closerange(4, 256)
        limit(job["limits"])
        confine(job, steps)
        source = job["program"]
        job.clear()
        serve_program(3, source)
    except BaseException:
        pass
    os._exit(0)


def confine(job, steps):
    for layer in (drop_capabilities, (lambda: apply_filter(steps)) if steps else no_filter):
        try:
            layer()
        except Missing:
            if not job["anyway"]:
                raise


def no_filter():
    raise Missing("seccomp: no filter for this processor")


def isolate(job):
    """Enters every layer; with `anyway`, what is missing is left out."""
    missing = []
    for layer in (lambda: enter_namespaces(os.getuid(), os.getgid()), lambda: empty_root(sys.argv[1], job["readable"])):
        try:
            layer()
        except (Missing, OSError) as error:
            missing.append(str(error))
            break  # without namespaces there is nothing to mount in
    if not job["filter"]:
        missing.append("seccomp: no filter for this processor")
    if missing and not job["anyway"]:
        raise Missing("; ".join(missing))
    return missing


def main():
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.set_int_max_str_digits(0)
    job = receive(0)
    result, verdict = {}, 1
    try:
        job["null"] = os.open("/dev/null", os.O_RDWR)
        result["missing"] = isolate(job)
        steps = bytes.fromhex(job["filter"])
        process, descriptor = start_program(job, steps)
        verdict = os.dup(1)  # after the fork, so that the program never had it
        os.dup2(job["null"], 1)  # what tests print is no verdict
        limit(job["judge_limits"])
        confine(job, steps)
        tests = receive(0)
        try:
            Judge(descriptor).judge(tests["tests"], tests["context"], tests["entry_point"])
            result["secret"] = tests["secret"]
        except Gone as gone:
            raise Wrong(str(gone) or f"the program ended before it answered{ended(process)}") from None
    except Missing as error:
        result["unavailable"] = str(error)
    except Wrong as error:
        result["why"] = str(error)
    except BaseException as error:
        result["why"] = ": ".join(describe(error))
    send(verdict, result)
    os._exit(0)


def ended(process):
    """How, where a signal ended it."""
    found, status, until = 0, 0, time.monotonic() + MAX_END_SECONDS
    try:
        while not found and time.monotonic() < until:  # its socket is closed: it has ended, or only closed it
            found, status = os.waitpid(process, os.WNOHANG)
            time.sleep(0 if found else 0.002)
    except OSError:
        return ""
    if not found or not os.WIFSIGNALED(status):
        return ""
    name = signal.Signals(os.WTERMSIG(status)).name
    return f" ({name}: CPU time or memory)" if name == "SIGKILL" else f" ({name})"


if __name__ == "__main__":
    main()
