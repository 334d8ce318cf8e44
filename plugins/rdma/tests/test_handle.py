"""What a reader accepts as a handle. None of this reaches NIXL."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from vllm_wt.errors import CorruptTransfer, InvalidInfo
from vllm_wt.info import Handle
from vllm_wt_rdma.info import BufferInfo, NixlHandle, decode


def make_handle() -> NixlHandle:
    return NixlHandle(
        nixl="nixl-cu13 1.5.1",
        host="01234567-89ab-cdef-0123-456789abcdef",
        emulation="error",
        agent="owner",
        generation=3,
        beacon=4096,
        nonce=77,
        buffers=(BufferInfo(address=8192, nbytes=10, device=0, kind="DRAM"),),
        metadata=base64.b64encode(b"what NIXL says").decode(),
    )


def test_a_handle_survives_the_wire() -> None:
    handle = make_handle()
    decoded = decode(handle.to_bytes(), owner="owner", generation=3)
    assert decoded == handle
    assert decoded.agent_metadata == b"what NIXL says"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 1),
        ("protocol", 3),
        ("protocol", "2"),
        ("nixl", 15),
        ("nixl", "x" * 129),
        ("host", None),
        ("host", "host.example"),
        ("host", "01234567-89AB-cdef-0123-456789abcdef"),
        ("host", "01234567-89ab-cdef-0123-456789abcdef\n"),
        ("emulation", "silence"),
        ("emulation", None),
        ("agent", "other"),
        ("agent", ""),
        ("agent", "a|b"),
        ("generation", 4),
        ("generation", -1),
        ("generation", 3.0),
        ("generation", True),
        ("beacon", 0),
        ("beacon", 2**64),
        ("beacon", "4096"),
        ("nonce", 0),
        ("nonce", 2**63),
        ("buffers", None),
        ("buffers", {}),
        ("buffers", [[8192, 10, 0, "DRAM"]]),
        ("metadata", ""),
        ("metadata", "not base64!"),
        ("metadata", "QUJDR"),
        ("metadata", None),
        ("extra", 1),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: Any) -> None:
    data = make_handle().to_wire() | {field: value}
    with pytest.raises(InvalidInfo) as caught:
        decode(json.dumps(data).encode(), owner="owner", generation=3)
    assert str(caught.value.where).split(".")[0] == field
    assert caught.value.backend == "rdma"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", 0),
        ("address", 2**64),
        ("address", 2**64 - 5),
        ("nbytes", 0),
        ("nbytes", -1),
        ("nbytes", 2**63),
        ("device", -1),
        ("device", 2**16),
        ("kind", "FILE"),
        ("kind", "dram"),
        ("extra", 1),
    ],
)
def test_a_wrong_buffer_is_refused(field: str, value: Any) -> None:
    data = make_handle().to_wire()
    data["buffers"][0][field] = value
    with pytest.raises(InvalidInfo) as caught:
        decode(json.dumps(data).encode(), owner="owner", generation=3)
    assert str(caught.value.where).startswith("buffers.0")


@pytest.mark.parametrize("field", sorted(make_handle().to_wire().keys() - {"protocol"}))
def test_a_missing_field_is_refused(field: str) -> None:
    data = make_handle().to_wire()
    del data[field]
    with pytest.raises(InvalidInfo) as caught:
        decode(json.dumps(data).encode(), owner="owner", generation=3)
    assert caught.value.where == field


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04N.", b"{", b"[" * 100_000, b"\xff\xfe", b'{"protocol": 1']
)
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptTransfer):
        decode(data, owner="owner", generation=3)


@pytest.mark.parametrize("data", [b"null", b"[]", b"3", b'"handle"', b'{"protocol": NaN}'])
def test_json_that_is_no_handle_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInfo):
        decode(data, owner="owner", generation=3)


def test_every_flipped_byte_is_caught_by_cores_checksum() -> None:
    wire = Handle.wrap("owner", 3, make_handle().to_bytes()).to_wire()
    body = wire["body"]
    for place in range(0, len(body), 7):
        flipped = body[:place] + ("A" if body[place] != "A" else "B") + body[place + 1 :]
        with pytest.raises(CorruptTransfer):
            Handle.from_wire(wire | {"body": flipped}, backend="rdma").unwrap(backend="rdma")
    assert Handle.from_wire(wire, backend="rdma").unwrap(backend="rdma")
