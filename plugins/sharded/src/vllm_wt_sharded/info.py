"""What a trainer of several ranks tells workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from vllm_wt.info import (
    Count,
    Digest,
    Handle,
    InitInfo,
    PullInitInfo,
    Staging,
    TransportName,
    UpdateInfo,
    Verify,
    WireInfo,
)

BackendName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


@dataclass(frozen=True, kw_only=True)
class OwnerInfo(WireInfo):
    """Where the pieces of one rank can be read.

    Args:
        handle: Of its memory; see `vllm_wt.pull.exposure` for what there is in it.
        packed: The pieces that come through its ring: the index of a first one among its pieces, and
            how many.
        slots: Most buffers of its ring.
        bucket_nbytes: Size of each.
    """

    handle: Handle
    packed: tuple[tuple[Count, Count], ...]
    slots: Count
    bucket_nbytes: Count

    @classmethod
    def of(cls, info: PullInitInfo) -> OwnerInfo:
        """Of a rank that exposes its pieces as a trainer of one rank does its tensors."""
        return cls(
            handle=info.handle,
            packed=info.packed,
            slots=info.slots,
            bucket_nbytes=info.bucket_nbytes,
        )


@dataclass(frozen=True, kw_only=True)
class ShardedInitInfo(InitInfo):
    """Init info of the ``sharded`` backend.

    Args:
        over: The backend whose Transport moves the bytes.
        transport: Which of that backend's Transports; empty for its default.
        layout: What each rank holds, as of `Layout.to_wire`: rank by rank, a rank's pieces in the order
            in which it exposes them.
        layout_digest: Of that.
        owners: By rank.
        verify: What is compared before the commit.
        staging: Where the workers receive.
    """

    over: BackendName
    transport: TransportName = ""
    layout: dict[str, Any]
    layout_digest: Digest
    owners: tuple[OwnerInfo, ...]
    verify: Verify = "digest"
    staging: Staging = "auto"


@dataclass(frozen=True, kw_only=True)
class ShardedUpdateInfo(UpdateInfo):
    """Update info of the ``sharded`` backend.

    Args:
        handles: Of all ranks, when memory of any has moved since they were told last.
    """

    handles: tuple[Handle, ...] = ()
