"""What an owner tells readers about its memory."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from vllm_wt.errors import CorruptTransfer, InvalidInfo
from vllm_wt.info import Count, Identifier, WireInfo
from vllm_wt_rdma.nixl import BACKEND

HANDLE_PROTOCOL: Final = 2
"""Version of :class:`NixlHandle`; both sides must agree."""
PIECE_BYTES: Final = 2 << 30
"""Most bytes of one registration. A longer buffer is registered in pieces of this, counted from its
first byte, and no read may cross from one to the next; so it is a part of the protocol. EFA takes a
million pages of 4 KiB with remote writes (ofiwg/libfabric#10402), others many times as much."""

Address = Annotated[int, Field(ge=1, lt=2**64)]
Nonce = Annotated[int, Field(ge=1, lt=2**63)]
MemoryKind = Literal["DRAM", "VRAM"]
HostId = Annotated[str, Field(pattern=r"^([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})?$")]
"""What Linux drew when the host was started; empty where it does not say."""
Emulation = Literal["error", "warning"]
"""What GPU memory of a peer on the same host that is read by emulation is."""


@dataclass(frozen=True, kw_only=True)
class BufferInfo(WireInfo):
    """One registered buffer.

    Args:
        address: Its first byte, in the owner's address space.
        nbytes: Its length, at least 1.
        device: NIXL's device number: the CUDA index, 0 for host memory.
        kind: ``"DRAM"`` or ``"VRAM"``.
    """

    address: Address
    nbytes: Annotated[int, Field(ge=1, lt=2**63)]
    device: Annotated[int, Field(ge=0, lt=2**16)]
    kind: MemoryKind


@dataclass(frozen=True, kw_only=True)
class NixlHandle(WireInfo):
    """One generation of an owner's memory.

    Args:
        protocol: :data:`HANDLE_PROTOCOL`.
        nixl: The owner's NIXL distribution and version; named in errors.
        host: The owner's host, so that a reader knows whether it is on the same one.
        emulation: What a reader there is to do about emulation.
        agent: The owner's name; NIXL's metadata must hold the same.
        generation: Of this memory.
        beacon: Address of an int64 in the owner's host memory that holds ``nonce`` for as long as
            this generation may be read.
        nonce: Random, so that neither another generation nor another process is taken for it.
        buffers: What can be read, in the order of the owner's region.
        metadata: NIXL's agent metadata, in base64. NIXL accepts flipped bytes in silence: core's
            checksum over the whole handle is what guards it.
    """

    protocol: Literal[2] = HANDLE_PROTOCOL
    nixl: Annotated[str, Field(max_length=128)]
    host: HostId
    emulation: Emulation
    agent: Identifier
    generation: Count
    beacon: Address
    nonce: Nonce
    buffers: tuple[BufferInfo, ...]
    metadata: Annotated[str, Field(min_length=4, max_length=2**28)]

    def to_bytes(self) -> bytes:
        """As JSON; :func:`decode` is the inverse."""
        return json.dumps(self.to_wire(), separators=(",", ":")).encode()

    @property
    def agent_metadata(self) -> bytes:
        """The metadata as NIXL wants it.

        Raises:
            InvalidInfo: It is not base64.
        """
        try:
            return base64.b64decode(self.metadata, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidInfo(
                "NixlHandle has a wrong value in the field 'metadata'",
                backend=BACKEND,
                where="metadata",
                expected="base64",
                got=error,
                cure="connect again",
            ) from None


def decode(data: bytes, *, owner: str, generation: int) -> NixlHandle:
    """Decode and check a peer's handle; nothing of it has reached NIXL yet.

    Args:
        data: JSON bytes.
        owner: Whose it must be.
        generation: Which it must be.

    Raises:
        CorruptTransfer: Not JSON.
        InvalidInfo: Not exactly a :class:`NixlHandle`, or of another owner or generation.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptTransfer(
            f"The handle of owner {owner!r} is not JSON",
            backend=BACKEND,
            where="open",
            got=error,
            cure="connect again",
        ) from None
    handle = NixlHandle.from_wire(fields, backend=BACKEND)
    _require("agent", handle.agent, owner)
    _require("generation", handle.generation, generation)
    for index, buffer in enumerate(handle.buffers):
        if buffer.address + buffer.nbytes > 2**64:
            _require(f"buffers.{index}.nbytes", buffer.nbytes, "an end within 64 bits")
    _ = handle.agent_metadata
    return handle


def _require(field: str, got: object, expected: object) -> None:
    if got != expected:
        raise InvalidInfo(
            f"NixlHandle has a wrong value in the field {field!r}",
            backend=BACKEND,
            where=field,
            expected=expected,
            got=got,
            cure="connect again",
        )
