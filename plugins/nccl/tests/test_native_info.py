"""What users of the native form give: which fields there are, and what each may be."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vllm_wt_nccl
from vllm_wt.errors import InvalidInfo, ManifestMismatch, WeightTransferError, WrongOrder
from vllm_wt.info import decode
from vllm_wt.manifest import TensorMeta
from vllm_wt_nccl import (
    NCCLTrainerSendWeightsArgs,
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
    plugin,
)
from vllm_wt_nccl.native_args import Place
from vllm_wt_nccl.native_group import Group
from vllm_wt_nccl.native_header import Header
from vllm_wt_nccl.native_parcels import Packing, parcels

from .support.native_sides import announced, send, trainer_init, worker

INIT = {"master_address": "h", "master_port": 5, "rank_offset": 1, "world_size": 2}
UPDATE: dict[str, Any] = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2, 3]]}


def _decoded(cls: type[Any], data: dict[str, Any]) -> Any:
    return decode(cls, data, backend="nccl", cure="send exactly its fields")


def test_the_spec_leads_to_the_native_form() -> None:
    path = plugin.vllm_wt_backend().native
    assert path is not None
    module, name = path.split(":")
    assert getattr(importlib.import_module(module), name) is NCCLWeightTransferEngine


def test_it_is_imported_without_vllm() -> None:
    code = (
        "import sys\n"
        "sys.modules['vllm'] = None\n"
        "import vllm_wt_nccl\n"
        "assert 'torch' not in sys.modules\n"
        "from vllm_wt_nccl import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine\n"
        "NCCLWeightTransferEngine.trainer_init, NCCLTrainerSendWeightsArgs(None)\n"
        "import vllm_wt_nccl.native_trainer\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_all_that_is_promised_is_there() -> None:
    for name in vllm_wt_nccl.__all__:
        assert getattr(vllm_wt_nccl, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = vllm_wt_nccl.no_such_name


def test_the_defaults_are_vllms() -> None:
    init = _decoded(NCCLWeightTransferInitInfo, INIT)
    assert init.packing == Packing(False, 1 << 30, 2)
    update = _decoded(NCCLWeightTransferUpdateInfo, UPDATE)
    assert update.packing(init.packing) == Packing(False, 1 << 30, 2)
    args = NCCLTrainerSendWeightsArgs(None)
    assert (args.src, args.post_iter_func, args.stream) == (0, None, None)
    assert args.packing == Packing(False, 1 << 30, 2)


def test_an_update_may_say_what_init_has_not() -> None:
    default = Packing(True, 4096, 3)
    assert _decoded(NCCLWeightTransferUpdateInfo, UPDATE).packing(default) == default
    said = {"packed": False, "packed_buffer_size_bytes": 8, "packed_num_buffers": 1}
    update = _decoded(NCCLWeightTransferUpdateInfo, UPDATE | said)
    assert update.packing(default) == Packing(False, 8, 1)


def test_dataclasses_cross_as_dictionaries() -> None:
    info = announced({"a": torch.zeros(2)}, packed=True)
    assert _decoded(NCCLWeightTransferUpdateInfo, asdict(info)) == info


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("master_address", ""),
        ("master_address", None),
        ("master_port", 0),
        ("master_port", "80"),
        ("master_port", 65536),
        ("rank_offset", "1"),
        ("world_size", 2.0),
        ("deadline_s", 0),
        ("packed_num_buffers", 0),
        ("no_such_field", 1),
    ],
)
def test_a_wrong_init_info_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidInfo, match=field):
        _decoded(NCCLWeightTransferInitInfo, INIT | {field: value})


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"names": []}, InvalidInfo, "0 names, 1 dtype_names, 1 shapes"),
        ({"names": [], "dtype_names": [], "shapes": []}, InvalidInfo, "one at least"),
        ({"shapes": []}, InvalidInfo, "1 names, 1 dtype_names, 0 shapes"),
        ({"dtype_names": ["torch.float32"]}, ManifestMismatch, "torch.float32"),
        ({"dtype_names": ["load"]}, ManifestMismatch, "load"),
        ({"shapes": [[-1]]}, ManifestMismatch, "impossible shape"),
        ({"shapes": [[2**40, 2**40]]}, InvalidInfo, "larger than any model"),
        ({"is_checkpoint_format": False}, InvalidInfo, "is_checkpoint_format"),
        (
            {"names": ["a", "a"], "dtype_names": ["int8"] * 2, "shapes": [[1]] * 2},
            ManifestMismatch,
            "'a' occurs twice",
        ),
    ],
)
def test_a_wrong_update_info_is_refused(
    changes: dict[str, Any], error: type[WeightTransferError], match: str
) -> None:
    info = _decoded(NCCLWeightTransferUpdateInfo, UPDATE | changes)
    with pytest.raises(error, match=match) as caught:
        info.manifest()
    assert caught.value.cure


def test_what_only_vllms_own_backend_has() -> None:
    info = _decoded(NCCLWeightTransferInitInfo, INIT | {"nccl_unique_id_b64": "aGk="})
    with pytest.raises(InvalidInfo, match="nccl_unique_id_b64"):
        worker().init_transfer_engine(info)
    with pytest.raises(InvalidInfo, match="nccl_unique_id_b64"):
        trainer_init(5, 2, nccl_unique_id_b64="aGk=")


def test_receiving_before_init() -> None:
    with pytest.raises(WrongOrder, match="init_weight_transfer_engine first"):
        worker().receive_weights(announced({"a": torch.zeros(1)}), lambda weights: None)


def test_the_trainer_may_give_an_object() -> None:
    assert Place.checked(NCCLWeightTransferInitInfo("h", 5, 1, 3)) == Place("h", 5, 3, 60.0)
    theirs = SimpleNamespace(master_address="h", master_port=5, world_size=3, other=1)
    assert Place.checked(theirs) == Place("h", 5, 3, 60.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("master_address", 7),
        ("master_address", None),
        ("master_port", 0),
        ("master_port", True),
        ("world_size", 1),
        ("world_size", "2"),
        ("deadline_s", float("nan")),
        ("deadline_s", -1),
        ("no_such_field", 1),
    ],
)
def test_what_the_trainer_gives_at_init_is_checked(field: str, value: Any) -> None:
    given = {"master_address": "127.0.0.1", "master_port": 5, "world_size": 2} | {field: value}
    with pytest.raises(InvalidInfo, match=field):
        NCCLWeightTransferEngine.trainer_init(given)


@pytest.fixture
def group() -> Any:
    """Of a CPU; nothing is sent by it."""
    rendezvous: Any = SimpleNamespace()
    return Group(rendezvous, SimpleNamespace(), rank=0, world_size=2, device=torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group", "PyNcclCommunicator"),
        ("src", 1),
        ("post_iter_func", 3),
        ("packed", "yes"),
        ("stream", object()),
        ("packed_buffer_size_bytes", 0),
        ("packed_num_buffers", 1.5),
        ("deadline_s", None),
        ("no_such_field", 1),
    ],
)
def test_what_the_trainer_gives_to_send_is_checked(group: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidInfo, match=field):
        send(**({"group": group} | {field: value}))


def test_trainer_args_of_another_kind() -> None:
    with pytest.raises(InvalidInfo, match="trainer_args"):
        NCCLWeightTransferEngine.trainer_send_weights([], trainer_args=None)
    with pytest.raises(InvalidInfo, match="group"):
        NCCLWeightTransferEngine.trainer_send_weights([], trainer_args={"packed": True})


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, [["a"], ["b"], ["c"], ["d"]]),
        (512, [["a", "b"], ["c"], ["d"]]),
        (1 << 20, [["a", "b", "c", "d"]]),
    ],
)
def test_parcels(limit: int, expected: list[list[str]]) -> None:
    sizes = {"a": 1, "b": 256, "c": 600, "d": 3}
    metas = [TensorMeta(name, "uint8", (size,)) for name, size in sizes.items()]
    made = parcels(metas, lambda meta: meta, Packing(True, limit, 2))
    assert [[meta.name for meta in parcel] for parcel in made] == expected
    alone = parcels(metas, lambda meta: meta, Packing(False, limit, 2))
    assert [[meta.name for meta in parcel] for parcel in alone] == [["a"], ["b"], ["c"], ["d"]]


def test_a_header_is_told_from_anything_else() -> None:
    header = Header(3, 1, 4096, 512, b"t" * 32, b"c" * 32)
    encoded = header.encode(torch.device("cpu"))
    assert Header.decode(encoded) == header
    end = Header(3, 2, 4096, 0)
    assert end.is_end
    assert Header.decode(end.encode(torch.device("cpu"))) == end
    for at in (0, 11, 15):  # of the magic, the version, the kind
        broken = encoded.clone()
        broken[at] ^= 1
        with pytest.raises(WeightTransferError, match="which they are"):
            Header.decode(broken)
