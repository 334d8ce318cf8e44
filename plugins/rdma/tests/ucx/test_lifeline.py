"""How a reader and an owner of one host hear of each other's end."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
from typing import Any

from vllm_wt_rdma.ucx.lifeline import OwnerLine, ReaderLine, this_host

_FORKS = """
import os, signal, sys
from vllm_wt_rdma.ucx.lifeline import OwnerLine
line = OwnerLine()
ready, begun = os.pipe()
if os.fork() == 0:
    os.write(begun, b"1")
    sys.stdin.read()  # outlives its parent
    os._exit(0)
os.read(ready, 1)
print(line.name, flush=True)
signal.pause()
"""


def test_each_side_hears_that_the_other_has_closed(bench: Any) -> None:
    owner, session = OwnerLine(), secrets.token_bytes(16)
    reader, other = (ReaderLine(this_host(), owner.name, each) for each in (session, bytes(16)))
    assert not reader.is_cut()
    assert not other.is_cut()
    assert list(owner.poll()) == []
    reader.close()
    assert list(owner.poll()) == [session]
    owner.close()
    bench.until(other.is_cut)
    other.close()


def test_a_line_to_another_host_is_never_cut() -> None:
    line = ReaderLine("another", secrets.token_hex(16), secrets.token_bytes(16))
    assert not line.is_cut()


def test_a_forked_process_is_not_taken_for_its_parent(bench: Any) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    line = ReaderLine(this_host(), owner.stdout.readline().strip(), secrets.token_bytes(16))
    assert not line.is_cut()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    bench.until(line.is_cut)
    line.close()
    owner.communicate()  # the forked process ends with its stdin
