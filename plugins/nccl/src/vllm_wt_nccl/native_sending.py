"""The trainer's walk through its tensors: each parcel is packed, described and broadcast."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import TensorMeta
from vllm_wt.packing import Copies, as_bytes, meta_of
from vllm_wt_nccl.communicator import Broadcast
from vllm_wt_nccl.keys import Keys
from vllm_wt_nccl.native_group import Group
from vllm_wt_nccl.native_header import Header, content_digest, tensors_digest
from vllm_wt_nccl.native_parcels import Buffers, Packing, layout_of, parcels

_LOOK_S = 0.02
"""Seconds between two looks at whether the round has failed elsewhere."""

Named = tuple[TensorMeta, torch.Tensor]


def awaited(
    broadcasts: Iterable[Broadcast], deadline: Deadline, watch: Callable[[], None], what: str
) -> None:
    """Until these are done.

    Raises:
        WeightTransferError: Of the fabric, the deadline or ``watch``, which is called now and then.
    """
    for broadcast in broadcasts:
        while not broadcast.wait(min(_LOOK_S, deadline.remaining())):
            deadline.check(what, where="broadcast")
            watch()


class Sending:
    """One round of the trainer's.

    Args:
        group: Its own.
        packing: How parcels are made.
        ticket: Number of the round.
        deadline: Of the round.
        watch: Called now and then; raises when the round has failed elsewhere.
    """

    def __init__(
        self,
        group: Group,
        packing: Packing,
        ticket: int,
        deadline: Deadline,
        watch: Callable[[], None],
    ) -> None:
        self._group = group
        self._packing = packing
        self._ticket = ticket
        self._deadline = deadline
        self._watch = watch
        self._buffers = Buffers(packing.buffers, group.device)
        self._under_way: list[list[Broadcast]] = [[] for _ in range(packing.buffers)]
        self._held: list[torch.Tensor | None] = [None] * packing.buffers
        """What is broadcast from where it is."""

    def run(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send them all, in their order.

        Raises:
            InvalidInfo, ManifestMismatch: What the trainer gave cannot be sent.
            WeightTransferError: Of the fabric, the deadline or ``watch``.
        """
        number = 0
        for parcel in parcels(_described(tensors), lambda named: named[0], self._packing):
            self._send(number, parcel)
            number += 1
        self._await(number)  # the buffer's turn
        end = Header(self._ticket, number, self._packing.limit, 0)
        self._start(number, [end.encode(self._group.device)])
        for turn in range(self._packing.buffers):
            self._await(turn)

    def _send(self, number: int, parcel: Sequence[Named]) -> None:
        self._await(number)
        payload = self._packed(number, parcel)
        metas = [meta for meta, _ in parcel]
        header = Header(
            self._ticket,
            number,
            self._packing.limit,
            payload.numel(),
            tensors_digest(metas),
            content_digest(payload),
        )
        rows = [(meta.name, meta.dtype, list(meta.shape)) for meta in metas]
        said = f"{json.dumps({'number': number, 'rows': rows})}\n"
        self._group.rendezvous.append(Keys(self._ticket).rows, said, self._deadline)
        self._start(number, [header.encode(self._group.device), payload])

    def _packed(self, number: int, parcel: Sequence[Named]) -> torch.Tensor:
        """The parcel as bytes: a tensor that is alone is read where it is."""
        device = self._group.device
        layout = layout_of([meta for meta, _ in parcel])
        if len(parcel) == 1 and parcel[0][0].nbytes:
            tensor = parcel[0][1].to(device).contiguous().resolve_conj().resolve_neg()
            self._held[number % self._packing.buffers] = tensor
            return as_bytes(tensor)
        buffer = self._buffers.take(number, layout.nbytes)
        places = [view for _, view in layout.views(buffer)]
        pairs = list(zip(places, (tensor for _, tensor in parcel), strict=True))
        Copies(pair for pair in pairs if pair[1].device == device).run()
        for to, tensor in pairs:
            if tensor.device != device:
                to.copy_(tensor)
        return buffer

    def _start(self, number: int, buffers: Sequence[torch.Tensor]) -> None:
        communicator = self._group.communicator
        seconds = self._deadline.remaining()
        self._under_way[number % self._packing.buffers] = [
            communicator.broadcast([each], seconds) for each in buffers
        ]

    def _await(self, number: int) -> None:
        """Until a parcel's buffer is free."""
        turn = number % self._packing.buffers
        awaited(
            self._under_way[turn],
            self._deadline,
            self._watch,
            "Not all workers have taken what was sent in time",
        )
        self._under_way[turn] = []
        self._held[turn] = None


def _described(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Named]:
    for name, tensor in tensors:
        given: tuple[object, object] = name, tensor
        if not (isinstance(given[0], str) and isinstance(given[1], torch.Tensor)):
            raise InvalidInfo(
                "What is to be sent is not a tensor with its name",
                where="trainer_send_weights",
                expected="pairs of a name and a torch.Tensor",
                got=f"{type(name).__name__} and {type(tensor).__name__}",
                cure="give model.named_parameters(), or make post_iter_func return a tensor",
            )
        plain = tensor.detach()
        _require_local(name, plain)
        yield meta_of(name, plain), plain


def _require_local(name: str, tensor: torch.Tensor) -> None:
    """A DTensor, say, has only a part of its values here."""
    has_values = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if has_values and tensor.layout == torch.strided and tensor.device.type in {"cpu", "cuda"}:
        return
    raise InvalidInfo(
        f"The tensor {name!r} does not have its values in memory of its own",
        where="trainer_send_weights",
        expected="a plain tensor on a CPU or CUDA device",
        got=f"{type(tensor).__name__}, {tensor.layout}, on {tensor.device}",
        cure="gather it, for example by post_iter_func=lambda item: item[1].full_tensor()",
    )
