"""Settings of UCX that are there while something is made, and gone afterwards."""

from __future__ import annotations

import os

import pytest
import torch

from vllm_wt_rdma import transport
from vllm_wt_rdma.endpoint import Endpoint
from vllm_wt_rdma.environment import variable
from vllm_wt_rdma.transport import NixlTransport

NAME = "VLLM_WT_TEST_OF_ENVIRONMENT"


@pytest.mark.parametrize("before", [None, "old"])
@pytest.mark.parametrize("value", [None, "new"])
def test_a_variable_is_afterwards_as_it_was(
    before: str | None, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    seen = []

    def fail_within() -> None:
        with variable(NAME, value):
            seen.append(os.environ.get(NAME))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_within()
    assert seen == [value]
    assert os.environ.get(NAME) == before


@pytest.mark.parametrize(("users", "ours"), [(None, "n"), ("y", "y")])
def test_ucx_is_told_not_to_watch_memory_for_nixl_alone(
    users: str | None, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_MEM_EVENTS", raising=False)
    if users is not None:
        monkeypatch.setenv("UCX_MEM_EVENTS", users)
    seen = []

    class Watched(Endpoint):
        def __init__(self, name: str) -> None:
            seen.append(os.environ.get("UCX_MEM_EVENTS"))
            super().__init__(name)

    monkeypatch.setattr(transport, "Endpoint", Watched)
    NixlTransport("alone", torch.device("cpu")).close()
    assert seen == [ours]
    assert os.environ.get("UCX_MEM_EVENTS") == users
