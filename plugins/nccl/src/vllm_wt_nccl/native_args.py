"""What the trainer gives in the native form, checked: the names are those of vLLM's own backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_wt.deadline import INIT_S, MAX_S, ROUND_S
from vllm_wt.errors import InvalidInfo, shown
from vllm_wt_nccl.native_group import Group
from vllm_wt_nccl.native_info import PACKED_BUFFER_SIZE_BYTES, PACKED_NUM_BUFFERS, unsupported
from vllm_wt_nccl.native_meeting import require_one_host
from vllm_wt_nccl.native_parcels import Packing

_NEEDED = ("master_address", "master_port", "world_size")
_KNOWN = {
    *_NEEDED,
    "deadline_s",
    "rank_offset",
    "packed",
    "packed_buffer_size_bytes",
    "packed_num_buffers",
    "nccl_unique_id_b64",
}


@dataclass
class NCCLTrainerSendWeightsArgs:
    """How ``trainer_send_weights`` sends.

    Args:
        group: Of ``trainer_init``.
        src: Rank of the sender; the trainer is 0.
        post_iter_func: Makes the tensor to send of a pair of name and tensor.
        packed: Whether several tensors share a broadcast. As in update_info.
        stream: On a GPU: what was queued on it before is waited for.
        packed_buffer_size_bytes: Most bytes of one broadcast of several tensors. As in update_info.
        packed_num_buffers: Of this side; need not be the workers'.
        deadline_s: Until all workers have everything.
    """

    group: Any
    src: int = 0
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor] | None = None
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: int = PACKED_NUM_BUFFERS
    deadline_s: float = ROUND_S

    @property
    def packing(self) -> Packing:
        return Packing(self.packed, self.packed_buffer_size_bytes, self.packed_num_buffers)

    @classmethod
    def checked(cls, given: Any) -> NCCLTrainerSendWeightsArgs:
        """These, or a dictionary of them.

        Raises:
            InvalidInfo: One is unknown, missing or wrong.
        """
        if isinstance(given, Mapping):
            try:
                given = cls(**given)
            except TypeError as error:
                raise InvalidInfo(
                    f"trainer_args is not what trainer_send_weights takes: {error}",
                    where="trainer_args",
                    expected="the fields of NCCLTrainerSendWeightsArgs",
                    got=shown(sorted(map(str, given))),
                    cure="give group, and packed as in update_info",
                ) from None
        if not isinstance(given, cls):
            raise _wrong("trainer_args", "an NCCLTrainerSendWeightsArgs, or a dictionary", given)
        given._check()
        return given

    def _check(self) -> None:
        if not isinstance(self.group, Group):
            raise _wrong(
                "group", "what NCCLWeightTransferEngine.trainer_init has returned", self.group
            )
        if self.src != 0:
            raise _wrong("src", "0: the trainer is the one that sends", self.src)
        if self.post_iter_func is not None and not callable(self.post_iter_func):
            raise _wrong("post_iter_func", "a function, or None", self.post_iter_func)
        if not isinstance(self.packed, bool):
            raise _wrong("packed", "True or False", self.packed)
        if self.stream is not None and self.group.device.type != "cuda":
            raise _wrong("stream", "None: this group is not of GPUs", self.stream)
        for name, most in (("packed_buffer_size_bytes", 1 << 48), ("packed_num_buffers", 1024)):
            _require_whole(name, getattr(self, name), 1, most)
        require_seconds(self.deadline_s)


@dataclass(frozen=True)
class Place:
    """Where the trainer is met, of ``trainer_init``."""

    address: str
    port: int
    world_size: int
    deadline_s: float

    @classmethod
    def checked(cls, given: Any) -> Place:
        """From a dictionary, or from an object that has the fields, an init info say.

        Raises:
            InvalidInfo: A field is unknown, missing or wrong.
        """
        if isinstance(given, Mapping):
            fields = dict(given)
        else:
            fields = {name: getattr(given, name) for name in _KNOWN if hasattr(given, name)}
        if unknown := sorted(str(name) for name in fields if name not in _KNOWN):
            raise InvalidInfo(
                f"trainer_init has no field {unknown[0]!r}",
                where="init_info",
                expected=f"of {', '.join(sorted(_KNOWN))}",
                got=unknown[0],
                cure="leave it out",
            )
        if lacking := [name for name in _NEEDED if fields.get(name) is None]:
            raise InvalidInfo(
                f"trainer_init lacks the field {lacking[0]!r}",
                where="init_info",
                expected=f"{', '.join(_NEEDED)}",
                got=shown(sorted(fields)),
                cure="give master_address and master_port as the engines have them, and world_size",
            )
        if fields.get("nccl_unique_id_b64") is not None:
            raise unsupported("nccl_unique_id_b64", "give master_address and master_port instead")
        address, port, world_size = (fields[name] for name in _NEEDED)
        if not (isinstance(address, str) and 0 < len(address) < 256):
            raise _wrong("master_address", "a name or an address of this host", address)
        require_one_host(address)
        _require_whole("master_port", port, 1, 65535)
        _require_whole("world_size", world_size, 2, 1 << 20)
        seconds = fields.get("deadline_s", INIT_S)
        return cls(address, port, world_size, require_seconds(seconds))


def require_seconds(value: Any) -> float:
    """A deadline.

    Raises:
        InvalidInfo: It is none.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= MAX_S:
        raise _wrong("deadline_s", f"seconds, more than 0 and at most {MAX_S}", value)
    return float(value)


def _require_whole(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, f"a whole number from {least} to {most}", value)


def _wrong(name: str, expected: str, value: Any) -> InvalidInfo:
    return InvalidInfo(
        f"The field {name!r} has no such value",
        where=name,
        expected=expected,
        got=shown(value),
        cure="see docs/migrate.md for what each field takes",
    )
