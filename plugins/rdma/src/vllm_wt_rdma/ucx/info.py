"""What an owner tells readers about its memory."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from vllm_wt.errors import CorruptTransfer, InvalidInfo
from vllm_wt.info import Count, Identifier, WireInfo
from vllm_wt_rdma.nixl import BACKEND

HANDLE_PROTOCOL: Final = 1
"""Version of :class:`UcxHandle`; both sides must agree."""

Hex128 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Hex256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class UcxHandle(WireInfo):
    """One generation of an owner's memory.

    Args:
        fabric: ``"ucx"``: NIXL's handles are of another form.
        protocol: :data:`HANDLE_PROTOCOL`.
        ucxx: The owner's UCXX distribution and version; named in errors.
        owner: Its name.
        generation: Of this memory.
        nonce: Random, so that neither another generation nor another process is taken for it.
        sizes: Bytes of each buffer of the owner's region, in its order.
        address: UCX's worker address, in base64.
        digest: SHA-256 of the address: UCX reads whatever it is given, and may crash over it.
        lifeline: Name of the owner's `Lifeline`.
        host: Where that name can be reached; see `lifeline.this_host`.
    """

    fabric: Literal["ucx"] = "ucx"
    protocol: Literal[1] = HANDLE_PROTOCOL
    ucxx: Annotated[str, Field(max_length=128)]
    owner: Identifier
    generation: Count
    nonce: Hex128
    sizes: tuple[Annotated[int, Field(ge=1, lt=2**63)], ...]
    address: Annotated[str, Field(min_length=4, max_length=2**16)]
    digest: Hex256
    lifeline: Hex128
    host: Annotated[str, Field(max_length=128)]

    def to_bytes(self) -> bytes:
        """As JSON; :func:`decode` is the inverse."""
        return json.dumps(self.to_wire(), separators=(",", ":")).encode()

    @property
    def worker_address(self) -> bytes:
        """The address as UCX wants it.

        Raises:
            CorruptTransfer: It is not base64, or not what the digest was made of.
        """
        try:
            found = base64.b64decode(self.address, validate=True)
        except (binascii.Error, ValueError):
            found = b""
        if hashlib.sha256(found).hexdigest() != self.digest:
            raise CorruptTransfer(
                f"The address of owner {self.owner!r} is not what it has sent",
                backend=BACKEND,
                where="open",
                expected=f"SHA-256 {self.digest}",
                got=hashlib.sha256(found).hexdigest(),
                cure="connect again",
            )
        return found


def encode_address(address: bytes) -> tuple[str, str]:
    """A worker address as a handle's ``address`` and ``digest``."""
    return base64.b64encode(address).decode(), hashlib.sha256(address).hexdigest()


def decode(data: bytes, *, owner: str, generation: int) -> UcxHandle:
    """Decode and check a peer's handle; nothing of it has reached UCX yet.

    Args:
        data: JSON bytes.
        owner: Whose it must be.
        generation: Which it must be.

    Raises:
        CorruptTransfer: Not JSON, or an address that was changed on its way.
        InvalidInfo: Not exactly a :class:`UcxHandle`, or of another owner or generation.
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
    handle = UcxHandle.from_wire(fields, backend=BACKEND)
    _require("owner", handle.owner, owner)
    _require("generation", handle.generation, generation)
    _ = handle.worker_address
    return handle


def _require(field: str, got: object, expected: object) -> None:
    if got != expected:
        raise InvalidInfo(
            f"UcxHandle has a wrong value in the field {field!r}",
            backend=BACKEND,
            where=field,
            expected=expected,
            got=got,
            cure="connect again",
        )
