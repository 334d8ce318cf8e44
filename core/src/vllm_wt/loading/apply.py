"""From received tensors to a model's own memory: what core needs of a model, and direct writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch

from vllm_wt.errors import LoadError
from vllm_wt.loading.plan import Copy, Fill, LoadPlan, Parameter
from vllm_wt.loading.regions import extent
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import DTYPES, Copies, meta_of

Weights = Sequence[tuple[str, torch.Tensor]]
"""Tensors by name."""


class Kept(Sequence[tuple[str, torch.Tensor]]):
    """Tensors by name whose memory an engine keeps, and hands over again each time as this very object.

    What was found out about it the last time holds still: a round takes no time for each tensor. From
    round to round only the engine holds it, so that the engine can free the memory.

    Args:
        weights: The tensors.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._weights = tuple(weights)

    @overload
    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, torch.Tensor]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._weights[index]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class ModelLoader(Protocol):
    """Puts received tensors into a live model. `vllm_wt.bridge.loader` does it for vLLM's."""

    def rehearse(self, manifest: Manifest) -> LoadPlan:
        """Find out what goes where; nothing is changed by it.

        Raises:
            LoadError: The model does not take these tensors, or would be left incomplete.
        """

    def use(self, plan: LoadPlan, batches: Sequence[Sequence[str]] | None = None) -> None:
        """Load by this plan from now on: that of :meth:`rehearse`, or one narrowed from it.

        Args:
            plan: What is received, and where it goes.
            batches: What :meth:`apply_batch` is going to be given, by `vllm_wt.loading.batches`
                from this plan. None: everything at once.

        Raises:
            LoadError: The model cannot be loaded in these batches.
        """

    def check(self, weights: Weights) -> None:
        """Look at the values, and at the model, before anything is touched.

        Args:
            weights: All tensors of the plan's manifest.

        Raises:
            LoadError: Two tensors for one parameter differ, or the model has changed.
        """

    def require_awake(self) -> None:
        """Look once more, just before all ranks agree to load; cheap.

        Raises:
            WrongOrder: The model has no memory now.
        """

    def apply(self, weights: Weights) -> None:
        """Load everything, in one step during which no forward pass may run.

        Raises:
            Exception: Of any class. The model can run, but mixes old and new weights.
        """

    def look(self) -> None:
        """See where the model has its tensors now, which takes some time, ahead of the first batch.

        Raises:
            WrongOrder: It has no memory now.
        """

    def apply_batch(self, number: int, weights: Weights, *, looked: bool = False) -> None:
        """Load one batch, and with the last one what modules keep of others.

        After the first call the model mixes old and new weights, until the last one has returned:
        no forward pass may run in between. The memory of ``weights`` is free again on return. Any
        thread may call it, one at a time; torch's default dtype is another one meanwhile, for all
        threads.

        Args:
            number: Of the batch: 0, 1 and so on. 0 begins an update, which gives up one that is not
                at its end; so does whatever fails.
            weights: Exactly the batch's tensors, in order.
            looked: Whether nothing but :meth:`look` has run in this process since the model was last
                looked at.

        Raises:
            WrongOrder: It is another batch's turn.
            Exception: Of any class. What the batches before it have loaded stays; the model can run,
                but mixes old and new weights until a whole update is in.
        """


_Casts = tuple[tuple[torch.dtype, bool], ...]
"""Dtypes one after another, and whether the bits are taken for it."""


@dataclass(frozen=True, slots=True)
class _Write:
    """One copy whose destination is settled."""

    copy: Copy
    whole: bool
    """Whether it reads all of its source in order."""
    casts: _Casts
    dest: torch.Tensor


class DirectWrites:
    """The copies and fills of some parameters, written into given memory.

    Tensors that come again are copied as one: that is prepared the second time, and the time that a
    run takes in Python does not grow with their number.

    Args:
        plan: Says what goes where. Its fallbacks are not done here.
        parameters: The tensors to write, by full name, of those that the plan writes.

    Raises:
        LoadError: A tensor differs from the recorded one in dtype, shape or strides.
    """

    def __init__(self, plan: LoadPlan, parameters: Mapping[str, torch.Tensor]) -> None:
        self._fills: list[tuple[torch.Tensor, Any]] = []
        self._writes: list[_Write] = []
        self._known: Mapping[str, torch.Tensor] | None = None
        self._others = self._writes
        self.prepared: Copies | None = None
        """What is copied as one, once its tensors have come again."""
        for name, tensor in parameters.items():
            _require_as_recorded(name, plan.parameters[name], tensor)
            fills, copies = plan.into(name)
            self._fills += [(_region(tensor, fill), fill.value) for fill in fills]
            self._writes += [
                _Write(
                    copy,
                    copy.source_offset == 0
                    and copy.numel == plan.source(copy.source).numel
                    and copy.source_strides == _contiguous(copy.shape),
                    _dtypes(copy),
                    _region(tensor, copy),
                )
                for copy in copies
            ]

    def run(self, sources: Mapping[str, torch.Tensor], *, kept: bool = False) -> None:
        """Write all of them.

        Args:
            sources: The tensors of the plan's manifest.
            kept: Whether the same object may come again, with the same tensors in the same memory.
        """
        if sources is not self._known:
            self._known, self.prepared, self._others = sources if kept else None, None, self._writes
        elif self.prepared is None:
            self._prepare(sources)
        with torch.no_grad():
            for dest, value in self._fills:
                dest.fill_(value)
            if self.prepared is not None:
                self.prepared.run()
            for write in self._others:
                write.dest.copy_(_value(write, sources[write.copy.source]))

    def forget(self) -> None:
        """Let go of the tensors that may come again."""
        self._known = self.prepared = None
        self._others = self._writes

    def _prepare(self, sources: Mapping[str, torch.Tensor]) -> None:
        pairs, others = [], []
        for write, alone in zip(self._writes, _apart(self._writes), strict=True):
            source = sources[write.copy.source]
            value = _value(write, source)
            if alone and value.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                pairs.append((write.dest, value))
            else:  # its order counts, or what it writes is made anew each time
                others.append(write)
        self.prepared, self._others = Copies(pairs), others


def _apart(writes: Sequence[_Write]) -> Iterator[bool]:
    """Of each, whether no other one reaches into the memory that it spans: its order is free."""
    spans = [(start := write.dest.data_ptr(), start + _span(write.dest)) for write in writes]
    order = sorted(range(len(spans)), key=spans.__getitem__)
    shared: set[int] = set()
    reach, last = 0, -1
    for number in order:
        start, end = spans[number]
        if start < reach:
            shared |= {number, last}
        if end > reach:
            reach, last = end, number
    return (number not in shared for number in range(len(writes)))


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    return extent(tensor.shape, tensor.stride()) * tensor.element_size()


def written_by(copy: Copy, source: torch.Tensor) -> torch.Tensor:
    """What a copy writes: shape ``copy.shape``, of the parameter's dtype."""
    return _cast(_read(copy, source), _dtypes(copy)).to(DTYPES[copy.dest_dtype])


def _value(write: _Write, source: torch.Tensor) -> torch.Tensor:
    copy = write.copy
    value = source.detach().reshape(copy.shape) if write.whole else _read(copy, source)
    return _cast(value, write.casts)


def _read(copy: Copy, source: torch.Tensor) -> torch.Tensor:
    flat = source.detach().contiguous()
    return flat.as_strided(
        copy.shape, copy.source_strides, flat.storage_offset() + copy.source_offset
    )


def _dtypes(copy: Copy) -> _Casts:
    return tuple((DTYPES[cast.dtype], cast.bits) for cast in copy.casts)


def _cast(value: torch.Tensor, casts: _Casts) -> torch.Tensor:
    for dtype, bits in casts:
        value = value.contiguous().view(dtype) if bits else value.to(dtype)
    return value


def _region(tensor: torch.Tensor, place: Copy | Fill) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.as_strided(
        place.shape, place.dest_strides, tensor.storage_offset() + place.dest_offset
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def recorded_as(expected: Parameter, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the layout that a plan was recorded with."""
    form = TensorMeta(expected.name, expected.dtype, expected.shape)
    return tensor.stride() == expected.strides and meta_of(expected.name, tensor) == form


def _require_as_recorded(name: str, expected: Parameter, tensor: torch.Tensor) -> None:
    if not recorded_as(expected, tensor):
        raise LoadError(
            f"The parameter {name!r} is not as it was recorded",
            where="apply",
            expected=f"{expected.dtype} {list(expected.shape)}, strides {list(expected.strides)}",
            got=f"{tensor.dtype} {list(tensor.shape)}, strides {list(tensor.stride())}",
            cure="connect again after the model has changed",
        )
