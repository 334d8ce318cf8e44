"""Which rank of the trainer sends which bytes of which tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import ITEMSIZE, Manifest, TensorMeta
from vllm_wt_nccl.ranges import holders, members

Senders = Literal["all", "rank0"]
Parts = tuple[tuple[int, int], ...]
"""Of one tensor, one after another: the rank that sends the part, and its bytes."""
MOST_SENDERS = 1 << 16


class Segment(NamedTuple):
    """What one rank sends of a tensor; offsets in bytes of the full tensor."""

    sender: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Cuts:
    """How all tensors are divided among the ranks: each byte of them is in one segment, and a rank has
    one segment of a tensor at most.

    Args:
        manifest: The full tensors.
        senders: How many ranks there are.
        kinds: The ways in which tensors are divided: layers are alike, so there are few.
        kind_of: The number of each tensor's.
    """

    manifest: Manifest
    senders: int
    kinds: tuple[Parts, ...]
    kind_of: tuple[int, ...]

    @classmethod
    def checked(
        cls,
        manifest: Manifest,
        senders: int,
        kinds: tuple[Parts, ...],
        kind_of: tuple[int, ...],
    ) -> Cuts:
        """As a trainer describes it.

        Raises:
            InvalidInfo: Some byte would not come, or come twice; or there is no such rank.
        """
        if not 1 <= senders <= MOST_SENDERS:
            raise _wrong("senders", f"1 to {MOST_SENDERS} ranks", senders)
        for kind in kinds:
            ranks = [rank for rank, _ in kind]
            if any(rank >= senders for rank in ranks) or len(set(ranks)) < len(ranks):
                raise _wrong("kinds", f"ranks below {senders}, each once a tensor", ranks)
            if any(nbytes < 1 for _, nbytes in kind):
                raise _wrong("kinds", "parts of one byte or more", [n for _, n in kind])
        if len(kind_of) != len(manifest):
            raise _wrong("kind_of", f"one for each of {len(manifest)} tensors", len(kind_of))
        for tensor, number in zip(manifest.tensors, kind_of, strict=True):
            if number >= len(kinds):
                raise _wrong("kind_of", f"numbers below {len(kinds)}", number)
            sizes = [nbytes for _, nbytes in kinds[number]]
            if sum(sizes) != tensor.nbytes or any(n % ITEMSIZE[tensor.dtype] for n in sizes):
                expected = f"{tensor.nbytes} bytes of {tensor.dtype} in all"
                raise _wrong("kinds", expected, sizes, name=tensor.name)
        return cls(manifest, senders, kinds, kind_of)

    @cached_property
    def of(self) -> Mapping[str, tuple[Segment, ...]]:
        """The segments of each tensor, in its order."""
        found = [_segments(kind) for kind in self.kinds]
        numbered = zip(self.manifest.tensors, self.kind_of, strict=True)
        return {tensor.name: found[number] for tensor, number in numbered}

    def own(self, sender: int) -> Manifest:
        """What one rank sends: its part of each tensor, as elements in a row; none of some."""
        return Manifest(tuple(self._own(sender, tensor) for tensor in self.manifest.tensors))

    def _own(self, sender: int, tensor: TensorMeta) -> TensorMeta:
        nbytes = sum(s.nbytes for s in self.of[tensor.name] if s.sender == sender)
        return TensorMeta(tensor.name, tensor.dtype, (nbytes // ITEMSIZE[tensor.dtype],))


def of_one(manifest: Manifest) -> Cuts:
    """One rank, which sends everything."""
    return _numbered(manifest, 1, [((0, t.nbytes),) if t.nbytes else () for t in manifest.tensors])


def divided(
    manifest: Manifest, dtensors: Mapping[str, Any], ranks: Sequence[int], senders: Senders
) -> Cuts:
    """Divide tensors among the ranks; each of them finds the same.

    With ``"all"`` a rank sends what it holds of a tensor, where that is one run of it. Of several that
    hold the same, and for a tensor that has to be gathered, it is the one that has the least so far.

    Args:
        manifest: The full tensors.
        dtensors: Those that are DTensors, by name.
        ranks: Of the trainer, each as ``torch.distributed`` counts it.
        senders: ``"rank0"``: the first of them sends everything.
    """
    if senders == "rank0":
        return of_one(manifest)
    number = {rank: index for index, rank in enumerate(ranks)}
    loads = [0] * len(ranks)
    kinds: list[Parts] = []
    for tensor in manifest.tensors:
        parts: list[tuple[int, int]] = []
        candidates = _candidates(tensor, dtensors.get(tensor.name), ranks) if tensor.nbytes else []
        for (start, end), of in candidates:
            least = min((number[rank] for rank in of), key=lambda index: (loads[index], index))
            parts.append((least, (end - start) * ITEMSIZE[tensor.dtype]))
            loads[least] += parts[-1][1]
        kinds.append(tuple(parts))
    return _numbered(manifest, len(ranks), kinds)


def _candidates(
    tensor: TensorMeta, dtensor: Any, ranks: Sequence[int]
) -> list[tuple[tuple[int, int], list[int]]]:
    """Who can send which elements: those that hold them, or all that take part in making the tensor."""
    everything = (0, tensor.numel)
    if dtensor is None:
        return [(everything, list(ranks))]
    held = holders(dtensor) or {}
    found = [(part, [rank for rank in held[part] if rank in ranks]) for part in held]
    if found and all(of for _, of in found):
        return found
    makers = [rank for rank in members(dtensor) if rank in ranks]
    if not makers:
        raise InvalidInfo(
            f"No rank of the group has a part of tensor {tensor.name!r}",
            where="group",
            expected="the ranks of its device mesh",
            got=f"ranks {list(ranks)}, mesh {list(members(dtensor))}",
            cure="give a group of all the trainer's ranks",
        )
    return [(everything, makers)]


def _numbered(manifest: Manifest, senders: int, each: Sequence[Parts]) -> Cuts:
    numbers = {parts: index for index, parts in enumerate(dict.fromkeys(each))}
    return Cuts(manifest, senders, tuple(numbers), tuple(numbers[parts] for parts in each))


def _segments(kind: Parts) -> tuple[Segment, ...]:
    found, offset = [], 0
    for rank, nbytes in kind:
        found.append(Segment(rank, offset, nbytes))
        offset += nbytes
    return tuple(found)


def _wrong(where: str, expected: str, got: object, name: str = "") -> InvalidInfo:
    of = f" tensor {name!r}" if name else " its tensors"
    return InvalidInfo(
        f"The trainer does not say right which of its ranks sends what of{of}",
        where=where,
        expected=expected,
        got=str(got)[:200],
        cure="both sides must run the same vllm-wt release",
    )
