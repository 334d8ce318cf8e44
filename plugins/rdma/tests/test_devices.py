"""The option ``devices``."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo, WeightTransferError
from vllm_wt.pull import PullTrainer
from vllm_wt.source import StateDictSource
from vllm_wt_rdma import devices
from vllm_wt_rdma.transport import NixlTransport

THERE = ["mlx5_0:1", "mlx5_1:1", "mlx5_1:2", "eth0", "lo"]
CPU = torch.device("cpu")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host's devices."""
    monkeypatch.setattr(devices, "there", lambda: THERE)


def test_devices_have_ucxs_names(tmp_path: Path) -> None:
    for path in ("infiniband/mlx5_1/ports/2", "infiniband/mlx5_0/ports/1", "net/lo", "net/eth0"):
        (tmp_path / path).mkdir(parents=True)
    for name in ("lo", "eth0"):
        (tmp_path / "net" / name / "ifindex").write_text("1")
    (tmp_path / "net" / "bonding_masters").write_text("")
    assert devices.there(tmp_path) == ["mlx5_0:1", "mlx5_1:2", "eth0", "lo"]
    assert devices.there(tmp_path / "nothing") == []


def test_this_hosts_interfaces_are_seen() -> None:
    assert {name for _, name in socket.if_nameindex()} <= set(devices.there())


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, None),
        ("eth0", "eth0"),
        ("mlx5_0:1", "mlx5_0:1"),
        ("mlx5_1", "mlx5_1"),
        ("mlx5_0:1, mlx5_1:2", "mlx5_0:1,mlx5_1:2"),
        (["mlx5_0:1", "eth0", "mlx5_0:1"], "mlx5_0:1,eth0"),
        (("lo",), "lo"),
    ],
)
def test_names(value: Any, found: str | None) -> None:
    assert devices.parsed(value) == found


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("value", "got"),
    [
        ("mlx5_9:1", "'mlx5_9:1'"),
        ("mlx5_0:2,eth0", "'mlx5_0:2'"),
        ("eth0:1", "'eth0:1'"),
        ("all", "'all'"),
        ("^eth0", "'^eth0'"),
        ("eth0,", "''"),
        ("", "''"),
        (["eth0,lo"], "'eth0,lo'"),
        ([], "[]"),
        (7, "7"),
        (b"eth0", "b'eth0'"),
        ([1], "[1]"),
        ({"eth0"}, "{'eth0'}"),
    ],
)
def test_what_names_no_device_is_refused(value: Any, got: str) -> None:
    with pytest.raises(InvalidInfo) as caught:
        devices.parsed(value)
    assert (caught.value.backend, caught.value.where) == ("rdma", "devices")
    assert caught.value.got == got
    assert f"of {', '.join(THERE)}" in str(caught.value.expected)
    assert "UCX_NET_DEVICES" in str(caught.value.cure)


def test_more_than_ucx_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"mlx5_{k}:1" for k in range(65)]
    monkeypatch.setattr(devices, "there", lambda: names)
    assert devices.parsed(names[:64]) == ",".join(names[:64])
    with pytest.raises(InvalidInfo):
        devices.parsed(names)


def test_where_nothing_is_shown_ucx_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "there", list)
    assert devices.parsed("mlx5_7:1") == "mlx5_7:1"
    with pytest.raises(InvalidInfo, match="no such network device"):
        devices.parsed("mlx5_7:1,")


@pytest.mark.parametrize("before", [None, "garbage"])
def test_an_agent_has_what_is_named_and_the_process_is_as_before(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """UCX refuses a device that is not there: so it has seen the name if and only if it fails."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("UCX_NET_DEVICES", before)
        with pytest.raises(WeightTransferError):
            NixlTransport("without", CPU)
    NixlTransport("with", CPU, devices=["lo"]).close()
    assert os.environ.get("UCX_NET_DEVICES") == before
    monkeypatch.setattr(devices, "there", list)
    with pytest.raises(WeightTransferError):
        NixlTransport("other", CPU, devices="nosuch0")
    assert os.environ.get("UCX_NET_DEVICES") == before


def trainer(**options: Any) -> PullTrainer:
    source = StateDictSource({"weight": torch.ones(3)})
    return PullTrainer(source, backend="rdma", transport_cls=NixlTransport, **options)


def test_a_trainer_takes_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "garbage")
    made = trainer(devices="lo", emulation="warning")
    made.describe(Deadline(30.0))
    made.shutdown()


def test_a_trainer_refuses_a_device_that_is_not_there() -> None:
    made = trainer(devices="nosuch0")
    with pytest.raises(InvalidInfo, match="no such network device"):
        made.describe(Deadline(30.0))
    made.shutdown()
