"""A process that holds memory: locked pages that the system can neither drop nor swap.

Owns: the balloon, and what is left beside it. Refuses: deciding how much; squeeze.py does.

    python benchmarks/balloon.py BYTES     holds them until its standard input ends; prints "held" first
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

from colibri.memory import available_bytes

STEP = 256 << 20


def hold(n_bytes: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    pieces = []
    for first in range(0, n_bytes, STEP):
        piece = mmap.mmap(-1, min(STEP, n_bytes - first))
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        if library.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(piece))) != 0:
            raise SystemExit(
                f"balloon.py: the system refused to lock {first + len(piece):,} bytes: "
                f"{os.strerror(ctypes.get_errno())}; run as root or raise ulimit -l"
            )
        pieces.append(piece)
    print("held", flush=True)
    sys.stdin.read()


@contextlib.contextmanager
def leaving(n_bytes: int) -> Iterator[int]:
    """All but so many bytes of what is available are held meanwhile; gives how many are."""
    free = available_bytes() or 0
    taken = free - n_bytes
    if taken <= 0:
        raise SystemExit(f"balloon.py: {free:,} bytes are available, fewer than the {n_bytes:,} to leave")
    command = [sys.executable, __file__, str(taken)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "held":
            raise SystemExit("balloon.py: the balloon was not held; its words are above")
        yield taken
    finally:
        process.communicate()


if __name__ == "__main__":
    hold(int(sys.argv[1]))
