"""What goes through the ring, from a source, round after round."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_wt.exposed import Exposed, is_plain, require_as_announced, require_memory
from vllm_wt.manifest import Manifest
from vllm_wt.pull.prepared import Prepared
from vllm_wt.pull.ring import Filling, Ring
from vllm_wt.source import Announced, WeightSource


class Pouring:
    """Takes the tensors that go through a ring from where they are, or makes them in their order.

    Where making a tensor is a collective of the trainer's ranks, all of them walk the source to its end
    in every round that was begun, whatever has become of it: a rank that stopped half-way would leave
    the others waiting.

    Args:
        source: The weights.
        manifest: What it had when the session began.
        packed: Names of the tensors that go through a ring.
        always: Whether the source is to be walked where nothing goes through a ring, too, since other
            ranks gather theirs from it.
    """

    def __init__(
        self,
        source: WeightSource,
        manifest: Manifest,
        packed: frozenset[str],
        *,
        always: bool = False,
    ) -> None:
        self._source = source
        self._always = always
        self._packed = packed
        self._metas = {tensor.name: tensor for tensor in manifest.tensors}
        self._watched = Exposed([])
        """Tensors that are there and go through the ring all the same."""
        self._prepared: Prepared | None = None
        self._pass: Iterator[tuple[str, torch.Tensor]] | None = None
        self._owed = False

    @property
    def is_steady(self) -> bool:
        """Whether everything is as it was prepared in the last round."""
        return self._watched.in_place and (self._prepared is not None or not self._packed)

    def begin(self) -> None:
        """A round begins: the source is to be walked, here or in `end`."""
        walked = bool(self._packed) or self._always
        self._owed = walked and not isinstance(self._source, Announced)

    def forget(self) -> None:
        """No rank has begun to make anything, so there is nothing to walk."""
        self._owed = False

    def look(self) -> None:
        """What has been written to the tensors until now is no change."""
        self._watched.look()

    def prepare(self, ring: Ring | None) -> None:
        """Find out whether all that goes through the ring is there, and stays while it is copied.

        Raises:
            ManifestMismatch: A tensor is not what the manifest says, or has lost its memory.
        """
        if ring is None:
            return
        there = {
            name: tensor
            for name, tensor in self._source.at_hand()
            if name in self._packed and is_plain(tensor)
        }
        for name, tensor in there.items():
            require_as_announced(self._metas, name, tensor)
            require_memory(name, tensor)
        self._watched = Exposed(list(there.values()))
        if len(there) < len(self._packed):
            self._prepared = None
        elif self._prepared is None or not self._prepared.made_of(ring, there):
            self._prepared = Prepared(ring, there)

    def pour(self, filling: Filling) -> None:
        """All of it, into the ring.

        Raises:
            ManifestMismatch: A tensor is not the one whose turn it is, or has lost its memory.
            WeightTransferError: Of the filling.
        """
        if self._prepared is not None:
            filling.pour(self._prepared.into)
            self._owed = False
            return
        self._pass = iter(self._source) if self._packed else iter(())
        for name, tensor in self._pass:
            if name in self._packed and tensor.numel():
                require_memory(name, tensor)
                filling.put(name, tensor)
            del tensor  # or it would be there while the next one is made
        self._owed, self._pass = False, None
        filling.end()

    def require_kept(self, cure: str) -> None:
        """See `Exposed.require_kept`."""
        self._watched.require_kept(cure)

    def end(self) -> None:
        """The round is over: what is left of the walk is done."""
        if self._owed:
            rest = self._pass if self._pass is not None else iter(self._source)
            self._owed, self._pass = False, None
            while next(rest, None) is not None:  # keeps none while the next one is made
                pass
