"""The entry point, and finding NIXL."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from vllm_wt.errors import BackendUnavailable
from vllm_wt.spec import Kind
from vllm_wt.transport import Transport
from vllm_wt_rdma import nixl, plugin
from vllm_wt_rdma.transport import NixlTransport
from vllm_wt_rdma.ucx import bindings
from vllm_wt_rdma.ucx.transport import UcxTransport


def test_importing_the_plugin_is_light() -> None:
    code = (
        "import sys, vllm_wt_rdma.plugin\n"
        "vllm_wt_rdma.plugin.vllm_wt_backend()\n"
        "heavy = {'torch', 'numpy', 'nixl_cu12', 'nixl_cu13', 'ucxx', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_spec_leads_to_the_transport() -> None:
    spec = plugin.vllm_wt_backend()
    assert (spec.name, spec.kind) == ("rdma", Kind.TRANSPORT)
    assert spec.transport is not None
    assert spec.transport == spec.transports["nixl"]
    found = {name: path.split(":") for name, path in spec.transports.items()}
    classes = {n: getattr(importlib.import_module(m), cls) for n, (m, cls) in found.items()}
    assert classes == {"nixl": NixlTransport, "ucx": UcxTransport}


@pytest.mark.parametrize("transport", [NixlTransport, UcxTransport])
@pytest.mark.parametrize(
    "method", [name for name in vars(Transport) if not name.startswith("_") or name == "__init__"]
)
def test_the_transport_has_the_contracts_parameters(method: str, transport: type) -> None:
    if method == "properties":
        pytest.fail("the contract gained a class attribute of this name; check it by hand")
    parameters = inspect.signature(getattr(transport, method)).parameters.values()
    ours = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]  # those are options
    assert ours == list(inspect.signature(getattr(Transport, method)).parameters)


@pytest.fixture
def fresh_search() -> Iterator[None]:
    nixl.load.cache_clear()
    yield
    nixl.load.cache_clear()


@pytest.mark.usefixtures("fresh_search")
def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", None)
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(BackendUnavailable) as caught:
        NixlTransport("nobody", torch.device("cpu"))
    assert caught.value.backend == "rdma"
    assert "pip install nixl-cu13" in str(caught.value)
    assert "nixl_cu12" in str(caught.value.got)
    assert "nixl_cu13" in str(caught.value.got)


def test_without_ucxx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    bindings.load.cache_clear()
    for use in (UcxTransport.require, lambda: UcxTransport("nobody", torch.device("cpu"))):
        with pytest.raises(BackendUnavailable) as caught:
            use()
        assert caught.value.backend == "rdma"
        assert "pip install 'vllm-wt-rdma[ucx]'" in str(caught.value)


@pytest.mark.usefixtures("fresh_search")
@pytest.mark.parametrize(
    ("cuda", "broken", "found"),
    [
        ("12.8", None, "nixl_cu12"),
        ("13.0", None, "nixl_cu13"),
        (None, None, "nixl_cu13"),
        ("13.0", "nixl_cu13", "nixl_cu12"),
        ("12.8", "nixl_cu12", "nixl_cu13"),
    ],
)
def test_the_build_that_fits_and_works_is_taken(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, broken: str | None, found: str
) -> None:
    builds = {name: ModuleType(name) for name in ("nixl_cu12", "nixl_cu13")}
    for name, module in builds.items():
        monkeypatch.setitem(sys.modules, name, None if name == broken else module)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert nixl.load().module is builds[found]
