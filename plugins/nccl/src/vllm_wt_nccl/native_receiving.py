"""A worker's walk through what is broadcast: each parcel must be the one that was announced."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import CorruptTransfer, ManifestMismatch, WeightTransferError
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.native import LoadWeights
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.native_group import Group
from vllm_wt_nccl.native_header import NBYTES, Header, content_digest, tensors_digest
from vllm_wt_nccl.native_parcels import Buffers, Packing, layout_of, parcels
from vllm_wt_nccl.native_sending import awaited

_CURE = "make names, dtype_names and shapes from what trainer_send_weights is given, in its order"


class Receiving:
    """One round of a worker's.

    Args:
        group: Its own.
        manifest: What was announced.
        packing: Likewise.
        ticket: Number of the round.
        deadline: Of the round.
        watch: Called now and then; raises when the round has failed elsewhere.
    """

    def __init__(
        self,
        group: Group,
        manifest: Manifest,
        packing: Packing,
        ticket: int,
        deadline: Deadline,
        watch: Callable[[], None],
    ) -> None:
        self._group = group
        self._manifest = manifest
        self._packing = packing
        self._ticket = ticket
        self._deadline = deadline
        self._watch = watch
        self._buffers = Buffers(min(2, packing.buffers), group.device)
        self._parcels = list(parcels(manifest.tensors, lambda tensor: tensor, packing))

    def run(self, load_weights: LoadWeights) -> None:
        """Receive all that was announced.

        While a parcel is verified and loaded the next one comes, where there are two buffers.

        Args:
            load_weights: Core's.

        Raises:
            ManifestMismatch: The trainer sends something else.
            CorruptTransfer: What came is not what the trainer had.
            WeightTransferError: Of the fabric, the deadline, ``watch`` or ``load_weights``.
        """
        before: Callable[[], None] | None = None
        for number, metas in enumerate(self._parcels):
            header = self._header()
            self._require_announced(header, number, metas)
            payload = self._buffers.take(number, header.nbytes)
            communicator = self._group.communicator
            coming = communicator.broadcast([payload], self._deadline.remaining())
            if before is not None:
                before()
            what = "Not all weights have come in time"
            awaited([coming], self._deadline, self._watch, what)
            before = self._taking(number, metas, header, payload, load_weights)
            if self._buffers.count == 1:
                before()
                before = None
        if before is not None:
            before()
        self._require_end(self._header())

    def _header(self) -> Header:
        came = torch.zeros(NBYTES, dtype=torch.uint8, device=self._group.device)
        coming = self._group.communicator.broadcast([came], self._deadline.remaining())
        awaited([coming], self._deadline, self._watch, "The trainer does not go on in time")
        return Header.decode(came)

    def _require_announced(self, header: Header, number: int, metas: Sequence[TensorMeta]) -> None:
        if header.ticket != self._ticket:
            raise CorruptTransfer(
                "The trainer sends another round than this worker is in",
                where="header",
                expected=f"round {self._ticket}",
                got=f"round {header.ticket}",
                cure="make a new group on all sides",
            )
        if header.limit != self._packing.limit:
            raise ManifestMismatch(
                "Trainer and update_info pack in different ways",
                where="packed, packed_buffer_size_bytes",
                expected=_said(self._packing.limit),
                got=_said(header.limit),
                cure="give NCCLTrainerSendWeightsArgs and update_info the same two values",
            )
        expected = layout_of(metas).nbytes
        found = (header.number, header.nbytes, header.tensors)
        if found == (number, expected, tensors_digest(metas)):
            return
        if header.is_end:
            last = f"the trainer ended before {metas[0].name!r}"
            raise self._mismatch(f"{len(self._manifest)} tensors", last)
        theirs = self._rows(header.number)
        for mine, other in zip(map(_row, metas), theirs, strict=False):
            if mine != other:
                raise self._mismatch(_shown(mine), _shown(other))
        raise self._mismatch(
            f"{len(metas)} tensors from {metas[0].name!r} to {metas[-1].name!r}",
            f"{len(theirs) or 'other'} tensors",
        )

    def _require_end(self, header: Header) -> None:
        if header.is_end and (header.ticket, header.number) == (self._ticket, len(self._parcels)):
            return
        theirs = self._rows(header.number)
        more = f"another one, {_shown(theirs[0])}" if theirs else "more"
        raise self._mismatch(f"{len(self._manifest)} tensors and no more", more)

    def _mismatch(self, expected: str, got: str) -> ManifestMismatch:
        return ManifestMismatch(
            "The trainer sends other tensors than update_info says",
            where=f"rank {self._group.rank}",
            expected=f"{expected}, as in update_info",
            got=f"{got}, from the trainer",
            cure=_CURE,
        )

    def _taking(
        self,
        number: int,
        metas: Sequence[TensorMeta],
        header: Header,
        payload: torch.Tensor,
        load_weights: LoadWeights,
    ) -> Callable[[], None]:
        """What is left to do with a parcel that has come."""

        def take() -> None:
            if content_digest(payload) != header.content:
                raise CorruptTransfer(
                    "Weights did not arrive as the trainer has them",
                    where=f"parcel {number}, tensors {metas[0].name!r} to {metas[-1].name!r}",
                    expected="the digest that the trainer made",
                    got="another one",
                    cure="leave the weights as they are until trainer_send_weights returns; if "
                    "they were, look for a broken fabric",
                )
            load_weights(list(layout_of(metas).views(payload)))

        return take

    def _rows(self, number: int) -> list[Any]:
        """What the trainer says is in a parcel; nothing, where that cannot be had."""
        with suppress(WeightTransferError, ValueError, KeyError, TypeError, RecursionError):
            key = Keys(self._ticket).rows
            for line in self._group.rendezvous.get(key, self._deadline, "the rows").splitlines():
                found = json.loads(line)
                if found["number"] == number:
                    return list(found["rows"])
        return []


def _row(tensor: TensorMeta) -> list[Any]:
    return [tensor.name, tensor.dtype, list(tensor.shape)]


def _shown(row: Any) -> str:
    return " ".join(map(str, row))[:200] if isinstance(row, list) else repr(row)[:200]


def _said(limit: int) -> str:
    return f"packed, {limit} bytes" if limit else "packed=False"
