"""What an owner tells readers about its memory."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from vllm_wt.errors import CorruptTransfer, InvalidInfo
from vllm_wt.info import Count, Identifier, WireInfo
from vllm_wt_ipc import BACKEND
from vllm_wt_ipc.control import SLOTS

HANDLE_PROTOCOL: Final = 1
"""Version of :class:`IpcHandle` and of the messages; both sides must agree."""

Nbytes = Annotated[int, Field(ge=1, lt=2**63)]


@dataclass(frozen=True, kw_only=True)
class Allocation(WireInfo):
    """One allocation of a GPU's memory.

    Args:
        handle: CUDA's handle of it, 64 bytes in base64.
        nbytes: Its size.
    """

    handle: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{86}==$")]
    nbytes: Nbytes

    @property
    def raw(self) -> bytes:
        """The handle as CUDA wants it."""
        return base64.b64decode(self.handle)


@dataclass(frozen=True, kw_only=True)
class BufferInfo(WireInfo):
    """One registered buffer.

    Args:
        kind: What ``memory`` counts: segments of the host's memory, or allocations of a GPU's.
        memory: Which of them it lies in.
        offset: Of its first byte from there.
        nbytes: Its length.
    """

    kind: Literal["host", "cuda"]
    memory: Count
    offset: Count
    nbytes: Nbytes


@dataclass(frozen=True, kw_only=True)
class IpcHandle(WireInfo):
    """One generation of an owner's memory.

    Args:
        protocol: :data:`HANDLE_PROTOCOL`.
        owner: The owner's name.
        generation: Of this memory.
        boot: Which boot of which host.
        network: Which network namespace there: that is where ``address`` means something.
        address: Name of the owner's abstract Unix socket.
        nonce: What a reader must say there, in hex.
        slot: The word of the owner's control page that belongs to this generation.
        word: What it holds for as long as this generation may be read.
        gpu: UUID of the GPU of all ``allocations``; empty when there are none.
        segments: Sizes of the segments of host memory.
        allocations: The GPU's memory.
        buffers: What can be read, in the order of the owner's region.
    """

    protocol: Literal[1] = HANDLE_PROTOCOL
    owner: Identifier
    generation: Count
    boot: Annotated[str, Field(pattern=r"^[0-9a-f-]{1,64}$")]
    network: Count
    address: Annotated[str, Field(pattern=r"^[0-9a-z-]{1,100}$")]
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    slot: Annotated[int, Field(ge=0, lt=SLOTS)]
    word: Annotated[int, Field(ge=1, lt=2**63)]
    gpu: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
    segments: tuple[Nbytes, ...]
    allocations: tuple[Allocation, ...]
    buffers: tuple[BufferInfo, ...]

    def to_bytes(self) -> bytes:
        """As JSON; :func:`decode` is the inverse."""
        return json.dumps(self.to_wire(), separators=(",", ":")).encode()


def parse(data: bytes) -> IpcHandle:
    """A peer's handle, of which nothing but its form has been checked.

    Raises:
        CorruptTransfer: Not JSON.
        InvalidInfo: Not exactly an :class:`IpcHandle`.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptTransfer(
            "The handle of an owner is not JSON",
            backend=BACKEND,
            where="open",
            got=error,
            cure="connect again",
        ) from None
    return IpcHandle.from_wire(fields, backend=BACKEND)


def decode(data: bytes, *, owner: str, generation: int) -> IpcHandle:
    """Decode and check a peer's handle; nothing has been connected to or mapped yet.

    Args:
        data: JSON bytes.
        owner: Whose it must be.
        generation: Which it must be.

    Raises:
        CorruptTransfer: Not JSON.
        InvalidInfo: Not exactly an :class:`IpcHandle`, or of another owner or generation.
    """
    handle = parse(data)
    _require("owner", handle.owner, owner)
    _require("generation", handle.generation, generation)
    if bool(handle.gpu) != bool(handle.allocations):
        _require("gpu", handle.gpu, "a UUID if there are allocations, else none")
    sizes = {"host": handle.segments, "cuda": [each.nbytes for each in handle.allocations]}
    for index, buffer in enumerate(handle.buffers):
        there = sizes[buffer.kind]
        if buffer.memory >= len(there):
            _require(f"buffers.{index}.memory", buffer.memory, f"below {len(there)}")
        if buffer.offset + buffer.nbytes > there[buffer.memory]:
            end = buffer.offset + buffer.nbytes
            _require(f"buffers.{index}", f"an end at {end}", f"at most {there[buffer.memory]}")
    return handle


def _require(field: str, got: object, expected: object) -> None:
    if got != expected:
        raise InvalidInfo(
            f"IpcHandle has a wrong value in the field {field!r}",
            backend=BACKEND,
            where=field,
            expected=expected,
            got=got,
            cure="connect again",
        )
