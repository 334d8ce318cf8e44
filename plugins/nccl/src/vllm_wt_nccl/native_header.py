"""What is broadcast before each parcel: which one it is, so that it is taken for no other."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_wt.digests import digest
from vllm_wt.errors import CorruptTransfer
from vllm_wt.manifest import Manifest, TensorMeta

_FORM = struct.Struct("!8sIIQQQQ32s32s")
_MAGIC = b"vllm-wt\0"
_VERSION = 1
_NONE = bytes(32)

NBYTES = _FORM.size


@dataclass(frozen=True)
class Header:
    """Of one parcel, or of the end of a round.

    Args:
        ticket: Number of the round.
        number: Of the parcel in it; at the end, how many there were.
        limit: `vllm_wt_nccl.native_parcels.Packing.limit` of the trainer.
        nbytes: Size of the parcel.
        tensors: SHA-256 over names, dtypes and shapes; zeros at the end.
        content: SHA-256 over the digests of the parcel's blocks; likewise.
    """

    ticket: int
    number: int
    limit: int
    nbytes: int
    tensors: bytes = _NONE
    content: bytes = _NONE

    @property
    def is_end(self) -> bool:
        return self.tensors == _NONE

    def encode(self, device: torch.device) -> torch.Tensor:
        """As it is broadcast: uint8, `NBYTES` long."""
        packed = _FORM.pack(
            _MAGIC,
            _VERSION,
            int(self.is_end),
            self.ticket,
            self.number,
            self.limit,
            self.nbytes,
            self.tensors,
            self.content,
        )
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)

    @classmethod
    def decode(cls, came: torch.Tensor) -> Header:
        """What was broadcast.

        Raises:
            CorruptTransfer: It is no header.
        """
        raw = came.cpu().numpy().tobytes()
        magic, version, is_end, ticket, number, limit, nbytes, tensors, content = _FORM.unpack(raw)
        header = cls(ticket, number, limit, nbytes, tensors, content)
        if (magic, version, is_end) != (_MAGIC, _VERSION, int(header.is_end)):
            raise CorruptTransfer(
                "What the trainer sent before its tensors is not what says which they are",
                where="header",
                expected=f"{_MAGIC!r}, version {_VERSION}",
                got=repr(raw[:16]),
                cure="run the same release of vllm-wt-nccl on both sides; connect again",
            )
        return header


def tensors_digest(metas: Sequence[TensorMeta]) -> bytes:
    """Of names, dtypes and shapes, in order."""
    return bytes.fromhex(Manifest(tuple(metas)).digest)


def content_digest(payload: torch.Tensor) -> bytes:
    """Of a parcel's bytes, by those of its blocks."""
    return hashlib.sha256(digest(payload).cpu().numpy().tobytes()).digest()
