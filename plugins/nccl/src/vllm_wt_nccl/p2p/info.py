"""What an owner tells readers about its memory."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from vllm_wt.errors import CorruptTransfer, InvalidInfo
from vllm_wt.info import Count, Identifier, WireInfo
from vllm_wt_nccl.info import Port
from vllm_wt_nccl.p2p import BACKEND

HANDLE_PROTOCOL: Final = 1
"""Version of :class:`P2pHandle` and of the messages; both sides must agree."""

Hex256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class P2pHandle(WireInfo):
    """One generation of an owner's memory.

    Args:
        fabric: ``"nccl_p2p"``.
        protocol: :data:`HANDLE_PROTOCOL`.
        owner: Its name.
        generation: Of this memory.
        secret: Random; who knows it may read.
        sizes: Bytes of each buffer of the owner's region, in its order.
        gpu: Where it can send from by NCCL: its GPU, as a digest; or nothing.
        host: Where ``ways`` of the loopback lead to the owner; see :func:`this_host`.
        ways: Addresses and ports that it listens on, the best ones first.
    """

    fabric: Literal["nccl_p2p"] = "nccl_p2p"
    protocol: Literal[1] = HANDLE_PROTOCOL
    owner: Identifier
    generation: Count
    secret: Hex256
    sizes: tuple[Annotated[int, Field(ge=1, lt=2**63)], ...]
    gpu: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    host: Annotated[str, Field(max_length=128)]
    ways: Annotated[
        tuple[tuple[Annotated[str, Field(max_length=64)], Port], ...], Field(max_length=8)
    ]

    def to_bytes(self) -> bytes:
        """As JSON; :func:`decode` is the inverse."""
        return json.dumps(self.to_wire(), separators=(",", ":")).encode()

    @property
    def secret_bytes(self) -> bytes:
        return bytes.fromhex(self.secret)

    def ways_from(self, host: str) -> list[tuple[str, int]]:
        """Where a reader may try to connect; addresses of a loopback are those of one host alone."""
        return [
            (address, port)
            for address, port in self.ways
            if host == self.host or not ipaddress.ip_address(address).is_loopback
        ]


def this_host() -> str:
    """Where a loopback is the same: a boot of a kernel, and a network of it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{Path('/proc/self/ns/net').stat().st_ino}"


def decode(data: bytes, *, owner: str, generation: int) -> P2pHandle:
    """Decode and check a peer's handle.

    Args:
        data: JSON bytes.
        owner: Whose it must be.
        generation: Which it must be.

    Raises:
        CorruptTransfer: Not JSON.
        InvalidInfo: Not exactly a :class:`P2pHandle`, or of another owner or generation.
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
    handle = P2pHandle.from_wire(fields, backend=BACKEND)
    _require("owner", handle.owner, owner)
    _require("generation", handle.generation, generation)
    for address, _ in handle.ways:
        _require_address(handle.owner, address)
    return handle


def _require_address(owner: str, address: str) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise InvalidInfo(
            f"The handle of owner {owner!r} has what is no address",
            backend=BACKEND,
            where="ways",
            expected="an IP address",
            got=address,
            cure="connect again",
        ) from None


def _require(field: str, got: object, expected: object) -> None:
    if got != expected:
        raise InvalidInfo(
            f"P2pHandle has a wrong value in the field {field!r}",
            backend=BACKEND,
            where=field,
            expected=expected,
            got=got,
            cure="connect again",
        )
