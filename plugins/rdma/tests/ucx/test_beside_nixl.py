"""UCXX's UCX in a process that NIXL's is in too, and where it was told not to watch memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from vllm_wt.errors import BackendUnavailable, PeerDead
from vllm_wt.transport import Copy
from vllm_wt_rdma.transport import NixlTransport
from vllm_wt_rdma.ucx import bindings

NBYTES = 64 << 20
_BOTH = """
import torch
from vllm_wt_rdma.transport import NixlTransport
from vllm_wt_rdma.ucx.transport import UcxTransport
makers = [NixlTransport, UcxTransport]
for make in {order}:
    make("end", torch.device("cpu"))
print("both")
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("ucxx")
@pytest.mark.parametrize("order", ["makers", "makers[::-1]"])
def test_both_start_in_one_process_in_either_order(order: str) -> None:
    done = run(_BOTH.format(order=order))
    assert (done.returncode, done.stdout.strip()) == (0, "both"), done.stderr


def test_an_owner_that_is_killed_is_peer_dead_with_nixl_there(bench: Any) -> None:
    nixl = NixlTransport("beside", torch.device("cpu"))
    owner, here = bench.owner(), bench.reader()
    here.open("owner", 1, owner.expose(NBYTES), bench.deadline())
    target, region = bench.arena(here, NBYTES)
    running = here.submit(here.prepare(region, [Copy("owner", 0, 0, 0, 0, NBYTES)]))
    bench.until(lambda: not here.poll(running).done and bool(target[:64].any()))
    owner.kill()
    with pytest.raises(PeerDead):
        bench.until(lambda: here.poll(running).done)
    here.close()
    nixl.close()


@pytest.mark.usefixtures("ucxx")
@pytest.mark.parametrize("setting", ["UCX_MEM_EVENTS=n", "UCX_MEM_MMAP_HOOK_MODE=none"])
def test_a_ucx_that_cannot_watch_memory_is_not_used(setting: str) -> None:
    code = (
        "import torch\n"
        "from vllm_wt.errors import BackendUnavailable\n"
        "from vllm_wt_rdma.ucx.transport import UcxTransport\n"
        "try:\n"
        "    UcxTransport('end', torch.device('cpu'))\n"
        "except BackendUnavailable as error:\n"
        "    print(error.where, error.got, error.cure, sep='|')\n"
    )
    name, _, value = setting.partition("=")
    done = run(code, **{name: value, "UCX_RCACHE_ENABLE": "try"})
    assert done.returncode == 0, done.stderr
    cure = 'unset them and start again; or transport="nixl"'
    assert done.stdout.splitlines()[-1] == f"start|{setting}|{cure}"


@pytest.mark.usefixtures("ucxx")
def test_an_environment_that_has_changed_since_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = bindings.load()

    def refuse(**_: Any) -> None:
        raise build.api.UCXUnsupportedError

    class Api:
        UCXContext = staticmethod(refuse)
        UCXUnsupportedError = build.api.UCXUnsupportedError
        Feature = build.api.Feature

    with pytest.raises(BackendUnavailable) as caught:
        bindings.Ucxx(Api, None, "").context()
    assert caught.value.got == "none now"
