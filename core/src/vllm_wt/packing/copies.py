"""Many copies between tensors as one, at the speed of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.packing.host import HostCopies, Run
from vllm_wt.packing.strided import runs_of

_DEVICES = ("cpu", "cuda")

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where to, and where from."""


class _Prepared(Protocol):
    def run(self) -> None: ...


class Copies:
    """Copies that are prepared once and done any number of times.

    Pairs may have any strides, and may differ in dtype: then they are cast, as by ``copy_``. Those of
    the same dtype and dense memory are copied as bytes, by threads on a CPU (as many as torch has) and
    by one kernel on a GPU, which takes strided ones of long runs, too. The order of the copies is not
    defined, so no destination may overlap another one or a source: that is for the caller to see to.

    The tensors are held, and their memory must stay where it is: see :attr:`in_place`.

    Args:
        pairs: Destinations and sources, of equal shape, all on one CPU or CUDA device. Pairs
            without elements are left out.

    Raises:
        ManifestMismatch: A pair differs in shape or device, or has no memory of its own.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._device: torch.device | None = None
        self._others: list[Pair] = []
        """Pairs left to ``copy_``."""
        dense: list[Pair] = []
        strided: list[Pair] = []
        tables: list[torch.Tensor] = []
        self._nbytes = 0
        for number, pair in enumerate(pairs):
            to, source = (tensor.detach() for tensor in pair)
            self._device = self._device or to.device
            _require_pair(number, to, source, self._device)
            if to.numel() == 0:
                continue
            self._nbytes += to.numel() * to.element_size()
            if _same_bytes(to, source):
                _require_memory(number, (to, source))
                dense.append((to, source))
            elif (table := _table(to, source)) is not None:
                _require_memory(number, (to, source))
                strided.append((to, source))
                tables.append(table)
            else:
                self._others.append((to, source))
        fast = dense + strided
        both = [tensor.untyped_storage() for pair in fast for tensor in pair]
        memory = {storage.data_ptr(): storage for storage in both}
        self._places, self._storages = list(memory), list(memory.values())
        self._written = [to for to, _ in fast]
        self._fast = _prepared(dense, strided, tables, self._device)

    @property
    def nbytes(self) -> int:
        """Bytes that a run writes."""
        return self._nbytes

    @property
    def in_place(self) -> bool:
        """Whether the memory of all tensors is where it was; ``resize_`` of a storage moves it.

        Looked at by each run on a CPU. On a GPU that would take as long as the copies, so a caller
        whose tensors may lose their memory (FSDP reshards, offloading) asks for it when they may have.
        """
        return list(map(torch.UntypedStorage.data_ptr, self._storages)) == self._places

    def run(self) -> None:
        """Do all copies.

        On CUDA they are started behind the work of the current stream, and not waited for; tensors
        must then outlive them as with ``copy_``. On a CPU they are done on return.

        Raises:
            ManifestMismatch: On a CPU, memory of a tensor has been freed or resized. Nothing is
                written then.
        """
        if self._device is None:
            return
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._run()
        else:
            self._require_in_place()
            self._run()

    def _run(self) -> None:
        self._fast.run()
        for to, source in self._others:
            to.copy_(source)
        # As copy_ does, for whoever has saved a destination or watches it for writes.
        torch.autograd.graph.increment_version(self._written)

    def _require_in_place(self) -> None:
        if not self.in_place:
            raise ManifestMismatch(
                "Memory of tensors to copy has been freed or resized",
                where="packing",
                expected="tensors that keep their memory",
                cure="prepare the copies again after a module was resharded or offloaded",
            )


class _ForeachCopies:
    """What there is on a GPU without Triton."""

    def __init__(self, dense: Sequence[Pair], strided: Sequence[Pair]) -> None:
        self._to = [_bytes_of(to) for to, _ in dense] + [to for to, _ in strided]
        self._sources = [_bytes_of(source) for _, source in dense] + [s for _, s in strided]

    def run(self) -> None:
        if self._to:
            torch._foreach_copy_(self._to, self._sources)


def _prepared(
    dense: Sequence[Pair],
    strided: Sequence[Pair],
    tables: Sequence[torch.Tensor],
    device: torch.device | None,
) -> _Prepared:
    if device is None or device.type == "cpu":
        return HostCopies(_runs(dense))
    try:
        from vllm_wt.packing.kernels import DeviceCopies
    except ImportError:
        return _ForeachCopies(dense, strided)
    runs = torch.tensor(_runs(dense), dtype=torch.int64).view(-1, 3)
    return DeviceCopies(torch.cat([runs, *tables]), device)


def _table(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    """The runs of a copy that is not dense, where the kernel can take them."""
    return runs_of(to, source) if to.is_cuda and _have_same_form(to, source) else None


def warm_up(device: torch.device) -> None:
    """See to it that the first copies of a device take no longer than others."""
    if device.type == "cuda":
        try:
            from vllm_wt.packing.kernels import warm_up as compile_kernel
        except ImportError:
            return
        compile_kernel(device)


def _runs(pairs: Iterable[Pair]) -> list[Run]:
    """The copies as addresses, neighbours on both sides made one."""
    runs: list[Run] = []
    for to, source, nbytes in sorted(
        (to.data_ptr(), source.data_ptr(), to.numel() * to.element_size()) for to, source in pairs
    ):
        last = runs[-1] if runs else Run(0, 0, 0)
        if (last.to + last.nbytes, last.source + last.nbytes) == (to, source):
            runs[-1] = Run(last.to, last.source, last.nbytes + nbytes)
        else:
            runs.append(Run(to, source, nbytes))
    return runs


def _same_bytes(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the copy is one of bytes that lie in the same order on both sides."""
    if not _have_same_form(to, source):
        return False
    if to.is_contiguous() and source.is_contiguous():
        return True
    dims = _dims(to)
    return dims == _dims(source) and _is_dense(dims)


def _have_same_form(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether an element of one is one of the other, bit by bit."""
    if to.dtype != source.dtype or to.is_quantized:
        return False
    # Else their memory does not hold their values.
    return not any(tensor.is_conj() or tensor.is_neg() for tensor in (to, source))


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension that has an effect on the place of elements."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in pairs if size != 1]


def _is_dense(dims: Iterable[tuple[int, int]]) -> bool:
    end = 1
    for stride, size in sorted(dims):
        if stride != end:
            return False
        end *= size
    return True


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor; shape ``(nbytes,)``, dtype uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _require_pair(
    number: int, to: torch.Tensor, source: torch.Tensor, device: torch.device
) -> None:
    if to.shape != source.shape:
        raise _mismatch(
            number, "differs in shape", f"{list(to.shape)}, as the destination", list(source.shape)
        )
    for tensor in (to, source):
        if tensor.device != device or device.type not in _DEVICES:
            expected = f"all on one device of type {' or '.join(_DEVICES)}"
            raise _mismatch(
                number, "is not on one device with the others", expected, f"{tensor.device}"
            )
        if not _is_plain(tensor):
            raise _mismatch(number, "has no plain memory", "strided tensors", type(tensor).__name__)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values are in memory of its own; a DTensor, say, takes over every operation."""
    dispatch = type(tensor).__torch_dispatch__
    return dispatch is torch.Tensor.__torch_dispatch__ and tensor.layout == torch.strided


def _require_memory(number: int, pair: Pair) -> None:
    for tensor in pair:
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        have = tensor.untyped_storage().nbytes()
        if have < end:
            raise _mismatch(
                number, "has lost its memory", f"{end} bytes", f"a storage of {have} bytes"
            )


def _mismatch(number: int, what: str, expected: str, got: object) -> ManifestMismatch:
    return ManifestMismatch(
        f"The pair of tensors to copy {what}",
        where=f"packing, pair {number}",
        expected=expected,
        got=got,
        cure="pair each destination with a tensor of its shape, in memory of the same device",
    )
