"""A peer's data is decoded strictly, or refused with the field, what was expected and what came."""

import json

import pytest

from vllm_wt.errors import CorruptTransfer, InvalidInfo, ManifestMismatch
from vllm_wt.info import Handle, InitInfo, PullInitInfo, PullUpdateInfo
from vllm_wt.manifest import Manifest, TensorMeta

MANIFEST = Manifest((TensorMeta("w", "bfloat16", (2, 3)), TensorMeta("s", "float32", ())))


def init_info() -> PullInitInfo:
    return PullInitInfo(
        session="s1",
        tensors=InitInfo.tensors_of(MANIFEST),
        manifest_digest=MANIFEST.digest,
        handle=Handle.wrap("trainer", 1, b"\x00body"),
    )


def update_info() -> PullUpdateInfo:
    return PullUpdateInfo(
        op="open", session="s1", version=3, ticket=4, manifest_digest=MANIFEST.digest
    )


@pytest.mark.parametrize("info", [init_info(), update_info()], ids=["init", "update"])
def test_round_trip_through_json(info):
    wire = json.loads(json.dumps(info.to_wire()))
    assert type(info).from_wire(wire, backend="rdma") == info


def test_manifest_round_trip():
    assert init_info().manifest() == MANIFEST


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", -1),
        ("version", "3"),
        ("version", True),
        ("version", 2.0),
        ("version", 2**63),
        ("op", "commit"),
        ("session", ""),
        ("session", "a b"),
        ("session", None),
        ("manifest_digest", "xyz"),
        ("deadline_s", 0),
        ("deadline_s", 1e9),
        ("deadline_s", "60"),
        ("ticket", []),
    ],
)
def test_wrong_value_names_field_and_value(field, value):
    wire = update_info().to_wire() | {field: value}
    with pytest.raises(InvalidInfo, match=f"PullUpdateInfo has a wrong value.*'{field}'") as error:
        PullUpdateInfo.from_wire(wire, backend="rdma")
    assert error.value.backend == "rdma"
    assert error.value.where == field
    assert error.value.got == repr(value)
    assert error.value.expected


def test_infinite_deadline_is_not_json():
    with pytest.raises(InvalidInfo, match="not JSON-safe"):
        PullUpdateInfo.from_wire(
            update_info().to_wire() | {"deadline_s": float("inf")}, backend="b"
        )


def test_unknown_field():
    with pytest.raises(InvalidInfo, match="has no field 'extra'") as error:
        PullUpdateInfo.from_wire(update_info().to_wire() | {"extra": 1}, backend="rdma")
    assert "version" in str(error.value.expected)


@pytest.mark.parametrize("field", ["op", "session", "version", "ticket", "manifest_digest"])
def test_missing_field(field):
    wire = update_info().to_wire()
    del wire[field]
    with pytest.raises(InvalidInfo, match=f"lacks the field '{field}'"):
        PullUpdateInfo.from_wire(wire, backend="rdma")


def test_nested_field_is_named_by_its_path():
    wire = init_info().to_wire()
    wire["tensors"][1]["shape"] = [-1]
    with pytest.raises(InvalidInfo) as error:
        PullInitInfo.from_wire(wire, backend="rdma")
    assert error.value.where == "tensors.1.shape.0"


def test_other_protocol():
    with pytest.raises(InvalidInfo, match="protocol"):
        PullInitInfo.from_wire(init_info().to_wire() | {"protocol": 2}, backend="rdma")


def test_manifest_that_disagrees_with_its_digest():
    wire = init_info().to_wire()
    wire["tensors"][0]["shape"] = [3, 2]
    with pytest.raises(CorruptTransfer, match="digest"):
        PullInitInfo.from_wire(wire, backend="rdma").manifest()


@pytest.mark.parametrize("dtype", ["float33", "__class__", "torch.float32", "Tensor"])
def test_dtype_outside_the_list(dtype):
    wire = init_info().to_wire()
    wire["tensors"][0]["dtype"] = dtype
    with pytest.raises(ManifestMismatch, match="dtype") as error:
        PullInitInfo.from_wire(wire, backend="rdma").manifest()
    assert error.value.got == dtype


def test_every_flipped_bit_of_a_handle_is_caught():
    handle = Handle.wrap("trainer", 7, bytes(range(40)))
    assert handle.unwrap(backend="rdma") == bytes(range(40))
    wire = handle.to_wire()
    for index in range(len(wire["body"])):
        for bit in range(7):
            flipped = chr(ord(wire["body"][index]) ^ (1 << bit))
            body = wire["body"][:index] + flipped + wire["body"][index + 1 :]
            damaged = Handle.from_wire(wire | {"body": body}, backend="rdma")
            with pytest.raises(CorruptTransfer):
                damaged.unwrap(backend="rdma")
    for field, value in {"owner": "trainee", "generation": 8}.items():
        with pytest.raises(CorruptTransfer):
            Handle.from_wire(wire | {field: value}, backend="rdma").unwrap(backend="rdma")
