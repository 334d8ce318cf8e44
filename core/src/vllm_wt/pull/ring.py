"""Tensors that are made one after another, on their way through a few buffers that readers read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property

import torch

from vllm_wt.deadline import Deadline
from vllm_wt.digests import BLOCK, Digests
from vllm_wt.errors import ManifestMismatch
from vllm_wt.exposed import is_plain
from vllm_wt.manifest import TensorMeta
from vllm_wt.packing import Buckets, Copies, as_bytes, meta_of, view_as
from vllm_wt.pull.exposure import Exposure

_WAIT_S = 0.0002
"""Seconds between two looks at whether a slot is free."""


class Ring:
    """The slots, reused from round to round.

    Args:
        exposure: Says what goes where; it has buckets.
        zeros: Makes a slot of so many bytes.
    """

    def __init__(self, exposure: Exposure, zeros: Callable[[int], torch.Tensor]) -> None:
        assert exposure.buckets is not None
        self.exposure = exposure
        self.buckets: Buckets = exposure.buckets
        self.slots = [zeros(exposure.slot_nbytes) for _ in range(exposure.slots_used)]
        self._digests: dict[tuple[int, int], Digests] = {}
        self._clearing: dict[int, Copies] = {}

    def slot(self, bucket: int) -> torch.Tensor:
        return self.slots[bucket % len(self.slots)]

    def digests(self, bucket: int) -> Digests:
        """Of a bucket's blocks; they take in what is behind a tensor's end."""
        nbytes = -(-self.buckets.size(bucket) // BLOCK) * BLOCK
        key = (bucket % len(self.slots), nbytes)
        if key not in self._digests:
            self._digests[key] = Digests([self.slot(bucket)[:nbytes]])
        return self._digests[key]

    def clear_padding(self, bucket: int) -> None:
        """Put zeros behind each tensor's end, where the slot has what the last bucket in it had.

        A bucket may have thousands of such places, so that it is prepared once, as the copies are.
        """
        if bucket not in self._clearing:
            slot, padding = self.slot(bucket), self.buckets.padding(bucket)
            zeros = slot.new_zeros(max((nbytes for _, nbytes in padding), default=0))
            self._clearing[bucket] = Copies(
                (slot[at : at + nbytes], zeros[:nbytes]) for at, nbytes in padding
            )
        self._clearing[bucket].run()


class Filling:
    """One pass of tensors through the ring, in the manifest's order.

    Args:
        ring: The slots.
        digests: Where the digests of all blocks go; None without.
        readers: How many must have read a bucket before its slot is used again.
        have_read: How many have read a bucket.
        ready: Tells the readers that they can read a bucket.
        watch: Raises when the round has failed.
        deadline: Of the round.
    """

    def __init__(
        self,
        ring: Ring,
        digests: torch.Tensor | None,
        *,
        readers: int,
        have_read: Callable[[int], int],
        ready: Callable[[int], None],
        watch: Callable[[], None],
        deadline: Deadline,
    ) -> None:
        self._ring = ring
        self._digests = digests
        self._readers = readers
        self._have_read = have_read
        self._ready = ready
        self._watch = watch
        self._deadline = deadline
        self._bucket: int | None = None

    @cached_property
    def _left(self) -> deque[TensorMeta]:
        """What is still to be put."""
        exposure = self._ring.exposure
        return deque(
            meta
            for meta in exposure.manifest.tensors
            if meta.name in exposure.packed or not meta.nbytes
        )

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor; it may change as soon as this has returned. Empty ones may be left out.

        Raises:
            ManifestMismatch: It is not the one whose turn it is, or not of the form announced.
            Timeout: The readers have not read what is before it in time.
            WeightTransferError: What ``watch`` raises.
        """
        got = meta_of(name, tensor)
        if not (self._left and self._left[0] == got):
            self._pass_over_empty(got)
        self._left.popleft()
        if not got.nbytes:
            return
        pieces = self._ring.buckets.pieces(name)
        data = None
        for piece in pieces:
            self._enter(piece.bucket)
            target = self._ring.slot(piece.bucket)[piece.offset : piece.offset + piece.nbytes]
            if len(pieces) == 1:
                view_as(target, got).copy_(tensor.detach())
                continue
            if data is None:
                data = as_bytes(tensor if is_plain(tensor) else _plain(tensor))
            target.copy_(data[piece.tensor_offset : piece.tensor_offset + piece.nbytes])

    def pour(self, into: Callable[[int], Copies]) -> None:
        """All tensors at once, by the copies into each bucket; instead of `put` and `end`.

        Raises:
            Timeout, WeightTransferError: As of `put`.
        """
        for bucket in range(self._ring.buckets.count):
            self._enter(bucket)
            into(bucket).run()
            self._hand_on(bucket)

    def end(self) -> None:
        """All tensors have been put.

        Raises:
            ManifestMismatch: One is missing.
        """
        self._pass_over_empty(None)
        self._leave()

    def _pass_over_empty(self, got: TensorMeta | None) -> None:
        """Up to ``got``; None is the end."""
        while self._left and self._left[0] != got and not self._left[0].nbytes:
            self._left.popleft()
        expected = self._left[0] if self._left else None
        if got != expected:
            raise _out_of_turn(expected, got)

    def _enter(self, bucket: int) -> None:
        if bucket == self._bucket:
            return
        self._leave()
        former = bucket - len(self._ring.slots)
        while former >= 0 and (have := self._have_read(former)) < self._readers:
            self._watch()
            self._deadline.check(
                "The workers have not read what is before this in time",
                where=f"bucket {bucket} of {self._ring.buckets.count}",
                got=f"{have} of {self._readers} workers",
            )
            self._deadline.wait(_WAIT_S)
        if self._digests is not None:  # a block's digest takes in what is behind a tensor's end
            self._ring.clear_padding(bucket)
        self._bucket = bucket

    def _leave(self) -> None:
        if self._bucket is None:
            return
        if self._digests is not None and self._digests.is_cuda:
            # What is in the bucket may have come on other streams.
            torch.cuda.synchronize(self._digests.device)
        self._hand_on(self._bucket)

    def _hand_on(self, bucket: int) -> None:
        """A bucket is full, as far as the current stream can see."""
        if self._digests is not None:
            first, count = self._ring.exposure.digests_of(bucket)
            self._ring.digests(bucket).run(self._digests[first : first + count])
        self._ready(bucket)
        self._bucket = None


class Nothing:
    """A sender where everything is read in place, or empty."""

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        raise ManifestMismatch(
            f"Tensor {name!r} is read where it is",
            where="send",
            expected="nothing to be sent",
            got=name,
            cure="use push",
        )

    def end(self) -> None:
        """There is nothing to do."""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _out_of_turn(expected: TensorMeta | None, got: TensorMeta | None) -> ManifestMismatch:
    def text(meta: TensorMeta | None) -> str:
        return "no more" if meta is None else f"{meta.name} {meta.dtype} {list(meta.shape)}"

    return ManifestMismatch(
        "The tensors differ from the manifest agreed on at init",
        where="send",
        expected=text(expected),
        got=text(got),
        cure="send the tensors in the manifest's order; connect again after changing what is sent",
    )
