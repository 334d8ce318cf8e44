"""What an owner tells readers about its memory, and how the backend's errors are made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field

from vllm_wt.errors import CorruptTransfer, InvalidInfo, WeightTransferError
from vllm_wt.info import Count, Identifier, WireInfo

BACKEND: Final = "echo"

_E = TypeVar("_E", bound=WeightTransferError)


def error(kind: type[_E], what: str, *, cure: str, **facts: Any) -> _E:
    """A typed error of this backend, to be raised."""
    return kind(what, backend=BACKEND, cure=cure, **facts)


@dataclass(frozen=True, kw_only=True)
class EchoHandle(WireInfo):
    """One generation of an owner's memory: what ``expose`` returns and ``open`` is given."""

    protocol: Literal[1] = 1  # of this class and of what the connections carry
    owner: Identifier
    generation: Count
    port: Annotated[int, Field(ge=1, lt=2**16)]  # on loopback
    secret: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # a port alone may be anybody's
    sizes: tuple[Annotated[int, Field(ge=1, lt=2**63)], ...]  # bytes of each buffer

    def to_bytes(self) -> bytes:
        """The SHA-256 of the JSON, then the JSON."""
        body = json.dumps(self.to_wire(), separators=(",", ":")).encode()
        return hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes, *, owner: str, generation: int) -> EchoHandle:
        """Decode what :meth:`to_bytes` returned; refuse all else before anything is done for it."""
        try:
            if data[:32] != hashlib.sha256(data[32:]).digest():
                raise ValueError("the SHA-256 does not match")
            fields = json.loads(data[32:])
        except (ValueError, RecursionError) as cause:
            what = f"The handle of owner {owner!r} is damaged, or none of this backend's"
            raise error(CorruptTransfer, what, got=cause, cure="connect again") from None
        handle = cls.from_wire(fields, backend=BACKEND)
        if (handle.owner, handle.generation) != (owner, generation):
            what = f"The handle is that of owner {handle.owner!r}, generation {handle.generation}"
            expected = f"owner {owner!r}, generation {generation}"
            cure = "open the handle that the owner gave for this generation"
            raise error(InvalidInfo, what, expected=expected, cure=cure)
        return handle
