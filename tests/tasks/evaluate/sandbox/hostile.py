# ruff: noqa: E501 - programs are lines of a table
"""Programs that a sandbox must survive. Each defines `answer`, for which `assert answer(20) == 42` must not pass."""

from __future__ import annotations

WRONG = "\ndef answer(x):\n    return 0\n"
"""What a hostile program answers after it did its harm."""

TESTS = "assert answer(20) == 42"

PROGRAMS: dict[str, str] = {
    "fork bomb": "import os\nwhile True:\n    os.fork()" + WRONG,
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(9,)).start()" + WRONG,
    "subprocess": "import subprocess\ndef answer(x):\n    return subprocess.run(['/bin/sh', '-c', 'echo 42'], capture_output=True).stdout",
    "memory": "x = []\nwhile True:\n    x.append(bytearray(2**24))" + WRONG,
    "endless loop": "while True:\n    pass" + WRONG,
    "endless output": "while True:\n    print('x' * 100000)" + WRONG,
    "sleep": "import time\ntime.sleep(10**6)" + WRONG,
    "huge answer": "def answer(x):\n    return 'x' * 10**8",
    "network": "import socket\ndef answer(x):\n    return len(socket.create_connection(('127.0.0.1', 80), 1).recv(10))",
    "reading files": "def answer(x):\n    return open('/etc/passwd').read() + open('/etc/shadow').read()",
    "environment": "import os\ndef answer(x):\n    return os.environ['PATH']",
    "writing anywhere": (
        "import os, sys\ndone = 0\nfor folder in ('/', '/etc', '/root', '/var/tmp', os.path.dirname(os.__file__)):\n    try:\n"
        "        open(folder + '/windlass-was-here', 'w').write('x')\n        done += 1\n    except OSError:\n        pass\n"
        "def answer(x):\n    return 42 if done else 0"
    ),
    "filling the disk": "with open('/tmp/x', 'wb') as f:\n    for _ in range(10**6):\n        f.write(b'x' * 2**20)" + WRONG,
    "killing the harness": "import os\nfor pid in (os.getppid(), -1, 0, *range(2, 40000)):\n    try:\n        os.kill(pid, 9)\n    except OSError:\n        pass" + WRONG,
    "ptrace": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def answer(x):\n    return 42 if libc.ptrace(16, os.getppid(), 0, 0) == 0 or libc.process_vm_readv(1, 0, 0, 0, 0, 0) >= 0 else 0"
    ),
    "exit code": "import sys\ndef answer(x):\n    sys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "printing success": (
        "import os\nfor fd in range(3, 20):\n    for text in (b'all tests passed', b'\\0\\0\\0\\x10{\"secret\": \"yes\"}'):\n        try:\n"
        "            os.write(fd, text)\n        except OSError:\n            pass" + WRONG
    ),
    "patching names": (
        "import builtins, sys\nbuiltins.AssertionError = Warning\ndef check(candidate):\n    pass\ndef set(*a):\n    return 1\n"
        "class int(int):\n    __eq__ = lambda self, other: True\nsys.modules['__main__'].check = check" + WRONG
    ),
    "always equal": "class E:\n    def __eq__(self, other):\n        return True\n    __ne__ = __lt__ = __eq__\n    def __hash__(self):\n        return 0\ndef answer(x):\n    return E()",
    "equal number": "class E(int):\n    def __eq__(self, other):\n        return True\ndef answer(x):\n    return E(7)",
    "atexit": "import atexit, os\natexit.register(lambda: os.write(1, b'secret'))\nraise SystemExit(0)" + WRONG,
    "looking for the secret": (
        "import gc, sys, re\ndef answer(x):\n    found = [o for o in gc.get_objects() if isinstance(o, dict) and 'secret' in o]\n"
        "    frame = sys._getframe()\n    while frame:\n        found += [v for v in frame.f_locals.values() if isinstance(v, dict) and ('tests' in v or 'secret' in v)]\n"
        "        frame = frame.f_back\n    return 42 if any('answer(20)' in repr(v) for v in found) else len(found)"
    ),
    "symlinks": "import os\ndef answer(x):\n    os.symlink('/etc', '/tmp/link')\n    os.chdir('/tmp/link')\n    return open('/tmp/link/passwd').read()",
    "/proc": "import os\ndef answer(x):\n    return open('/proc/self/environ').read() + open('/proc/1/maps').read() + str(os.listdir('/proc'))",
    "core dump": "import os\nos.abort()" + WRONG,
    "segmentation fault": "import ctypes\nctypes.string_at(0)" + WRONG,
    "signals": "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\nwhile True:\n    pass" + WRONG,
    "huge traceback": "def answer(x):\n    raise ValueError('x' * 10**8)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef answer(x):\n    return answer(x) + 1",
    "text that raises": "class E(Exception):\n    def __str__(self):\n        raise self\ndef answer(x):\n    raise E()",
    "namespaces": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def answer(x):\n    return 42 if libc.unshare(0x10000000) == 0 or libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 or libc.chroot(b'/tmp') == 0 else 0"
    ),
}  # fmt: skip
