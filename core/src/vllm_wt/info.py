"""The dataclasses that cross between trainer and workers, and their strict decoding.

Everything here is JSON-safe. A peer's data is decoded by pydantic in strict mode: an unknown or
missing field, a wrong type or a value out of range is an :class:`~vllm_wt.errors.InvalidInfo`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import Self

from vllm_wt.deadline import INIT_S, MAX_S, ROUND_S, Deadline
from vllm_wt.errors import CorruptTransfer, InvalidInfo, PluginError
from vllm_wt.manifest import Manifest, TensorMeta

PROTOCOL: Final = 1
"""Version of everything in this module; both sides must agree."""

STRICT: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""How a dataclass that crosses is decoded: its ``__pydantic_config__``."""
T = TypeVar("T")

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A version, generation, ticket or byte count."""
Seconds = Annotated[float, Field(gt=0, le=MAX_S)]
"""A deadline: more than 0, at most a day."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A SHA-256 in hex."""
Identifier = Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")]
"""A session, owner or reader name."""
EngineName = Annotated[str, Field(pattern=r"^[\w.:-]{1,64}$")]
"""Short, as it is a part of readers' names."""
TransportName = Annotated[str, Field(pattern=r"^([a-z][a-z0-9_-]{0,31})?$")]
"""Of one of a backend's Transports; empty for the default."""
Op = Literal["open", "poll", "seal", "all", "abort", "confirm"]
"""What one ``update_weights`` call asks for. ``all`` is open and seal in one call; ``abort`` gives a
round of this session up; ``confirm`` fails unless the model is whole and what it got last in this
session is the attempt ``ticket`` (0: nothing)."""

Verify = Literal["off", "bytes", "digest"]
"""What is compared before a commit: nothing, the number of bytes, or a digest of every block."""
Staging = Literal["auto", "device", "host", "none"]
"""Where a worker receives; see `vllm_wt.loading.arena`."""


@dataclass(frozen=True, kw_only=True)
class WireInfo:
    """Base of all dataclasses that cross the wire."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    def to_wire(self) -> dict[str, Any]:
        """The fields as JSON-safe data; :meth:`from_wire` is its inverse."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        wire: dict[str, Any] = json.loads(json.dumps(own, default=asdict))
        return wire

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], *, backend: str) -> Self:
        """Decode a peer's data.

        Args:
            data: What came over the wire.
            backend: Named in the error.

        Raises:
            InvalidInfo: Not exactly this dataclass, as JSON.
        """
        return decode(
            cls,
            data,
            backend=backend,
            cure="send what WeightSync sends; both sides must run the same vllm-wt release and the "
            "same backend",
        )


def decode(cls: type[T], data: Mapping[str, Any], *, backend: str, cure: str) -> T:
    """A peer's data as a dataclass, strictly.

    Args:
        cls: A dataclass whose ``__pydantic_config__`` is :data:`STRICT`.
        data: What came over the wire.
        backend: Named in the error.
        cure: What the sender can do about an error.

    Raises:
        InvalidInfo: Not exactly this dataclass, as JSON.
        PluginError: The dataclass has a field that JSON cannot bring.
    """
    if not isinstance(data, Mapping):
        raise InvalidInfo(
            f"{cls.__name__} must be a mapping",
            backend=backend,
            expected="a JSON object, one for all ranks",
            got=type(data).__name__,
            cure=cure,
        )
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInfo(
            f"{cls.__name__} is not JSON-safe: {error}",
            backend=backend,
            expected="JSON data",
            cure=cure,
        ) from None
    try:
        adapter = _adapter(cls)  # type: ignore[arg-type]
    except (PydanticUserError, NameError) as error:
        raise PluginError(
            f"{cls.__name__} cannot be decoded: {error.args[0]}",
            backend=backend,
            expected="a dataclass whose fields have types that JSON has",
            cure="install a fixed release of the backend",
        ) from None
    try:
        decoded: T = adapter.validate_json(text)
    except ValidationError as error:
        raise _invalid(cls, error, backend, cure) from None
    return decoded


def seconds_left(deadline: Deadline) -> float:
    """What is left of a deadline, as a legal wire value even when nothing is."""
    return max(0.001, deadline.remaining())


@lru_cache(maxsize=64)
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _invalid(cls: type[Any], error: ValidationError, backend: str, cure: str) -> InvalidInfo:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"]) or "(the whole)"
    known = ", ".join(f.name for f in fields(cls)) or "no field at all"
    kind = first["type"]
    if kind in {"unexpected_keyword_argument", "extra_forbidden"}:
        what, expected, got = f"{cls.__name__} has no field {path!r}", f"only {known}", path
    elif kind in {"missing", "missing_argument", "missing_keyword_only_argument"}:
        what, expected, got = f"{cls.__name__} lacks the field {path!r}", f"all of {known}", "none"
    else:
        what = f"{cls.__name__} has a wrong value in the field {path!r}"
        expected, got = first["msg"], repr(first.get("input"))[:200]
    return InvalidInfo(
        what,
        backend=backend,
        where=path,
        expected=expected,
        got=got,
        cure=cure,
    )


@dataclass(frozen=True, kw_only=True)
class Handle(WireInfo):
    """Fabric-specific data that lets a reader reach an owner's memory, with its checksum.

    Fabrics accept flipped bytes in silence (seen with NIXL 1.5), so the body is checked here first.
    """

    owner: Identifier
    generation: Count
    body: str
    checksum: Digest

    @classmethod
    def wrap(cls, owner: str, generation: int, body: bytes) -> Handle:
        """Wrap what a Transport's ``expose`` returned."""
        text = base64.b64encode(body).decode()
        return cls(
            owner=owner,
            generation=generation,
            body=text,
            checksum=_checksum(owner, generation, text),
        )

    def unwrap(self, *, backend: str) -> bytes:
        """The body, checked.

        Raises:
            CorruptTransfer: It is not what :meth:`wrap` produced.
        """
        if self.checksum != _checksum(self.owner, self.generation, self.body):
            raise CorruptTransfer(
                f"The handle of owner {self.owner!r} was damaged on its way",
                backend=backend,
                expected=f"SHA-256 {self.checksum[:12]}...",
                got=f"{_checksum(self.owner, self.generation, self.body)[:12]}...",
                cure="connect again",
            )
        try:
            return base64.b64decode(self.body, validate=True)
        except binascii.Error as error:
            raise CorruptTransfer(
                f"The handle of owner {self.owner!r} is not base64: {error}",
                backend=backend,
                cure="connect again",
            ) from None


def _checksum(owner: str, generation: int, body: str) -> str:
    return hashlib.sha256(f"{owner}\n{generation}\n{body}".encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TensorInfo(WireInfo):
    """:class:`~vllm_wt.manifest.TensorMeta` on the wire."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


@dataclass(frozen=True, kw_only=True)
class TrainerInfo(WireInfo):
    """Which process a trainer is, so that an engine need not change its trainer unnoticed.

    Args:
        host: Its name.
        pid: Of the process there.
        born: When that has begun, in clock ticks since its host has.
        beacon: Address and port where it answers as long as it lives; empty for none.
    """

    host: Annotated[str, Field(max_length=256)]
    pid: Count
    born: Count
    beacon: Annotated[str, Field(max_length=256)] = ""

    def is_same_process(self, other: TrainerInfo) -> bool:
        """Whether both are sessions of one process."""
        return (self.host, self.pid, self.born) == (other.host, other.pid, other.born)


@dataclass(frozen=True, kw_only=True)
class InitInfo(WireInfo):
    """What every backend's ``init_info`` has.

    Args:
        session: Name of the trainer's session; a new trainer has a new one.
        tensors: The manifest, in the order of the source.
        manifest_digest: :attr:`Manifest.digest`, checked against ``tensors``.
        deadline_s: Seconds the worker may spend in init.
        engine: What the trainer calls this engine.
        trainer: Which process it is; None where it does not say.
        takes_over: Whether it wants the engine from a trainer that lives, too.
    """

    session: Identifier
    tensors: tuple[TensorInfo, ...]
    manifest_digest: Digest
    protocol: Literal[1] = PROTOCOL
    deadline_s: Seconds = INIT_S
    engine: EngineName = "engine"
    trainer: TrainerInfo | None = None
    takes_over: bool = False

    def manifest(self) -> Manifest:
        """The manifest, checked.

        Raises:
            ManifestMismatch: Empty, a name twice, an unknown dtype.
            CorruptTransfer: The digest disagrees with the tensors.
        """
        manifest = Manifest(tuple(TensorMeta(t.name, t.dtype, t.shape) for t in self.tensors))
        if manifest.digest != self.manifest_digest:
            raise CorruptTransfer(
                "The manifest disagrees with its digest",
                expected=self.manifest_digest,
                got=manifest.digest,
                cure="connect again",
            )
        return manifest

    @staticmethod
    def tensors_of(manifest: Manifest) -> tuple[TensorInfo, ...]:
        """The field ``tensors`` for a manifest."""
        return tuple(
            TensorInfo(name=t.name, dtype=t.dtype, shape=t.shape) for t in manifest.tensors
        )


@dataclass(frozen=True, kw_only=True)
class UpdateInfo(WireInfo):
    """What every backend's ``update_info`` has.

    Args:
        op: See :data:`Op`.
        session: Must equal the session of init.
        version: Version of the weights that are sent.
        ticket: Number of this attempt, from 1, never used twice in a session; late signals of an
            earlier attempt cannot be taken for this one's. 0 before the first.
        manifest_digest: Digest of the manifest that the source has now.
        deadline_s: Seconds left for the whole round.
        paused: Whether the engine runs no forward passes until this round has ended. Only an engine
            that loads what it receives at once asks for that.
    """

    op: Op
    session: Identifier
    version: Count
    ticket: Count
    manifest_digest: Digest
    deadline_s: Seconds = ROUND_S
    paused: bool = False


@dataclass(frozen=True, kw_only=True)
class PullInitInfo(InitInfo):
    """Init info of every backend that is a Transport.

    Args:
        handle: Where the buffers can be read; see `vllm_wt.pull.exposure` for what they are.
        others: The same of the trainer's other ranks, each with memory of its own; a worker reads the
            one that is near it.
        verify: What is compared before the commit.
        staging: Where the workers receive.
        packed: The tensors that come through the ring: index of a first one in the manifest, and how
            many.
        bucket_nbytes: Size of a buffer of the ring.
        slots: Most buffers of the ring.
        mapped: Whether workers load all of it from where it is.
        transport: Which of the backend's Transports the workers take.
    """

    handle: Handle
    others: tuple[Handle, ...] = ()
    verify: Verify = "bytes"
    staging: Staging = "auto"
    packed: tuple[tuple[Count, Count], ...] = ()
    bucket_nbytes: Count = 0
    slots: Count = 0
    mapped: bool = False
    transport: TransportName = ""


@dataclass(frozen=True, kw_only=True)
class PullUpdateInfo(UpdateInfo):
    """Update info of every backend that is a Transport.

    Args:
        handle: The new handle when memory moved since init or the last round.
        others: With it, those of the trainer's other ranks.
        ahead: The trainer asks before it has looked at its weights: they are not to be read until it
            has signalled that they can be.
    """

    handle: Handle | None = None
    others: tuple[Handle, ...] = ()
    ahead: bool = False
