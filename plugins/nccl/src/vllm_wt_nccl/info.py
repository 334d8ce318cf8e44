"""What crosses between trainer and workers of the ``nccl`` backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from vllm_wt.info import Count, InitInfo, Staging, UpdateInfo, Verify, WireInfo
from vllm_wt.manifest import Manifest
from vllm_wt_nccl.cutting import Cuts, of_one

Host = Annotated[str, Field(min_length=1, max_length=255)]
"""A name or an address."""
Port = Annotated[int, Field(ge=1, le=65535)]


@dataclass(frozen=True, kw_only=True)
class NcclInitInfo(InitInfo):
    """Where the trainer is met, and how its tensors come.

    Args:
        address: Of the trainer's rendezvous.
        port: Likewise.
        bucket_nbytes: Most bytes of one broadcast; both sides cut the tensors, in the manifest's
            order, at its multiples.
        verify: What is compared before the commit.
        staging: Where the workers receive.
        device: Kind of memory of the trainer's buckets, and so the library that carries them.
        senders: Ranks of the trainer, each with a communicator of its own.
        kinds: Of several: the ways in which tensors are divided among them, each as rank and bytes of
            one part after another.
        kind_of: The number of each tensor's.
    """

    address: Host
    port: Port
    bucket_nbytes: Count
    verify: Verify
    staging: Staging
    device: Literal["cpu", "cuda"]
    senders: Count = 1
    kinds: tuple[tuple[tuple[Count, Count], ...], ...] = ()
    kind_of: tuple[Count, ...] = ()

    def cuts(self, manifest: Manifest) -> Cuts:
        """Who sends what.

        Raises:
            InvalidInfo: Not each byte of each tensor comes once.
        """
        if self.senders == 1 and not self.kind_of:
            return of_one(manifest)
        return Cuts.checked(manifest, self.senders, self.kinds, self.kind_of)


@dataclass(frozen=True, kw_only=True)
class NcclUpdateInfo(UpdateInfo):
    """Nothing of this backend's own: names, shapes and layout have crossed at init."""


@dataclass(frozen=True, kw_only=True)
class Call(WireInfo):
    """Who takes part in a round.

    Args:
        group: Number of the communicator: another one than in the last round is made anew.
        members: Numbers of the workers, in the order of their ranks in it, from 1 on; the trainer is 0.
    """

    group: Count
    members: tuple[Count, ...]
