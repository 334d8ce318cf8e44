"""The entry point, and what of it needs no GPU."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import BackendUnavailable
from vllm_wt.spec import Capability, Kind
from vllm_wt.transport import MappingTransport
from vllm_wt_ipc import cuda, plugin
from vllm_wt_ipc.baseline import IpcCopy
from vllm_wt_ipc.transport import IpcTransport


def test_importing_the_plugin_is_light() -> None:
    code = (
        "import sys, vllm_wt_ipc.plugin\n"
        "vllm_wt_ipc.plugin.vllm_wt_backend()\n"
        "heavy = {'torch', 'numpy', 'cuda', 'triton', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cpu_needs_nothing_of_cuda() -> None:
    code = (
        "import sys, torch\n"
        "from vllm_wt_ipc.transport import IpcTransport\n"
        "t = IpcTransport('t', torch.device('cpu'))\n"
        "t.expose(t.register([t.allocate(10, torch.device('cpu'))]), 1)\n"
        "bad = {'cuda', 'cuda.bindings', 'vllm_wt.packing.kernels'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_spec_leads_to_the_transport() -> None:
    spec = plugin.vllm_wt_backend()
    assert (spec.name, spec.kind) == ("ipc", Kind.TRANSPORT)
    assert set(spec.unsupported) == {Capability.MULTI_HOST}
    for path, found in ((spec.transport, IpcTransport), (spec.baseline, IpcCopy)):
        assert path is not None
        module, name = path.split(":")
        assert getattr(importlib.import_module(module), name) is found


@pytest.mark.parametrize(
    "method",
    sorted(
        name
        for name, value in inspect.getmembers(MappingTransport, callable)
        if not name.startswith("_") or name == "__init__"
    ),
)
def test_the_transport_has_the_contracts_parameters(method: str) -> None:
    ours = inspect.signature(getattr(IpcTransport, method)).parameters
    assert list(ours) == list(inspect.signature(getattr(MappingTransport, method)).parameters)


def test_without_cuda_bindings_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda.driver.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(BackendUnavailable) as caught:
        IpcTransport("nobody", torch.device("cuda", 0))
    assert "pip install cuda-bindings" in str(caught.value)


def test_the_baseline_copies_the_bytes() -> None:
    owner, reader = IpcCopy("owner", torch.device("cpu")), IpcCopy("reader", torch.device("cpu"))
    values = torch.arange(100_000).to(torch.uint8)
    target = torch.zeros_like(values)
    handle = owner.expose(values)
    deadline = Deadline(20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deadline, "wait", lambda *_: owner.progress())
        reader.connect(handle, target, 1)
    reader.read(deadline)
    assert torch.equal(target, values)
    for end in (owner, reader):
        end._transport.close()
