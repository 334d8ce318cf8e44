"""Another source's weights in another dtype: half the bytes where a trainer keeps float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from vllm_wt.errors import InvalidInfo
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import DTYPES
from vllm_wt.sources.base import WeightSource


class Cast(WeightSource):
    """Floating-point tensors of a source in one dtype; all others as they are.

    What is cast is made anew in each pass, tensor by tensor, and so takes the memory of one.

    Args:
        source: The weights.
        dtype: That they are sent in, rounded as ``Tensor.to`` does: ``torch.bfloat16``, say.

    Raises:
        InvalidInfo: It is no dtype that could be sent, or none of numbers with a fraction.
    """

    def __init__(self, source: WeightSource, dtype: torch.dtype) -> None:
        names = [name for name, known in DTYPES.items() if known is dtype]
        if not names or not dtype.is_floating_point:
            raise InvalidInfo(
                "Weights cannot be cast to this",
                where="dtype",
                expected="a floating-point dtype, such as torch.bfloat16",
                got=repr(dtype),
                cure="give one, or the source itself",
            )
        self._source = source
        self._dtype = dtype
        self._name = names[0]

    def manifest(self) -> Manifest:
        return Manifest(tuple(self._sent_as(tensor) for tensor in self._source.manifest().tensors))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._cast(iter(self._source))

    def distributed(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._source.distributed() if self._yields_casts else iter(())

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._cast(self._source.parts()) if self._yields_casts else iter(self)

    @property
    def _yields_casts(self) -> bool:
        """Whether a pass is that of this class: one derived from it may make others."""
        return type(self).__iter__ is Cast.__iter__

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source.at_hand():
            if not tensor.is_floating_point() or tensor.dtype is self._dtype:
                yield name, tensor

    @property
    def device(self) -> torch.device:
        return self._source.device

    @property
    def made(self) -> frozenset[str]:
        """What the source makes, and what is cast."""
        cast = (t.name for t in self._source.manifest().tensors if self._sent_as(t) != t)
        return self._source.made.union(cast)

    def _cast(
        self, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _sent_as(self, tensor: TensorMeta) -> TensorMeta:
        floating = DTYPES[tensor.dtype].is_floating_point
        return replace(tensor, dtype=self._name) if floating else tensor
