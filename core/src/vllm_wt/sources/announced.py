"""A source without values, for trainers that make their tensors themselves and hand them over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from vllm_wt.errors import InvalidInfo, shown
from vllm_wt.exposed import require_memory
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.packing import meta_of
from vllm_wt.sources.base import WeightSource
from vllm_wt.sources.tensors import ModuleSource, TensorSource
from vllm_wt.sources.vllm_source import VllmSource, is_vllm_source
from vllm_wt.sources.whole import is_gathered, require_sendable, whole

_WHERE = "Announced"
_ACCEPTED = (
    "a Manifest, a mapping of names to tensors, a torch.nn.Module, a source, or an iterable of "
    "(name, dtype, shape) or of (name, tensor)"
)


class Announced(WeightSource):
    """What will be sent, and no values: for sessions whose trainer hands its tensors over.

    The order is that in which they will be sent. Nothing of ``what`` is kept but names, dtypes and
    shapes, and no tensor is gathered; of a DTensor its full shape counts.

    Args:
        what: A `Manifest`; a mapping of names to tensors, on the meta device or not; a module, whose
            parameters are meant, or a `WeightSource`, vLLM's too; or an iterable, be it walked only
            once, of ``(name, dtype, shape)`` or of ``(name, tensor)``.
        device: Where the tensors will be, so that what they are put into is made there. By default
            where the first one of ``what`` is; else the CUDA device in use, or the CPU.

    Raises:
        InvalidInfo: It is none of these. From a pass: there are no values.
        ManifestMismatch: No tensors, a name that occurs twice, or a dtype or shape that cannot be sent.
    """

    def __init__(self, what: Any, *, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._manifest = self._described(what)

    def manifest(self) -> Manifest:
        return self._manifest

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise InvalidInfo(
            "What was announced has no values",
            where=_WHERE,
            expected="tensors that are handed over",
            got="a pass over the source",
            cure="use begin, send and end of the session",
        )

    def at_hand(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    @property
    def device(self) -> torch.device:
        return super().device if self._device is None else self._device

    @property
    def made(self) -> frozenset[str]:
        """All names."""
        return frozenset(tensor.name for tensor in self._manifest.tensors)

    def _described(self, what: Any) -> Manifest:
        if isinstance(what, Manifest):
            return what
        if isinstance(what, torch.nn.Module):
            what = ModuleSource(what)
        elif is_vllm_source(what) and not isinstance(what, WeightSource):
            what = VllmSource(what)
        if isinstance(what, TensorSource):
            what = what._items()  # its manifest refuses tensors of the meta device
        elif isinstance(what, WeightSource):
            if self._device is None:
                self._device = what.device
            return what.manifest()
        elif isinstance(what, Mapping):
            what = what.items()
        elif not isinstance(what, Iterable) or isinstance(what, str | bytes | torch.Tensor):
            raise InvalidInfo(
                "This does not say what will be sent",
                where=_WHERE,
                expected=_ACCEPTED,
                got=type(what).__name__,
                cure="give the names, dtypes and full shapes, in the order in which they will be sent",
            )
        return Manifest(tuple(self._meta(entry) for entry in what))

    def _meta(self, entry: Any) -> TensorMeta:
        match entry:
            case (name, torch.Tensor() as tensor):
                _require_described(name, tensor)
                if self._device is None and tensor.device.type != "meta":
                    self._device = tensor.device
                return meta_of(name, tensor)
            case (str(name), torch.dtype() | str() as dtype, shape):
                try:
                    sizes = tuple(int(size) for size in shape)
                except (TypeError, ValueError):
                    pass
                else:
                    return TensorMeta(name, str(dtype).removeprefix("torch."), sizes)
        raise InvalidInfo(
            "This does not describe a tensor",
            where=_WHERE,
            expected="(name, dtype, shape) or (name, tensor)",
            got=shown(entry),
            cure='give for example ("lm_head.weight", torch.bfloat16, (32000, 4096))',
        )


def handed_over(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors as a caller hands them over, each checked, as the full plain tensor that is sent.

    Raises:
        InvalidInfo: These are no names and tensors, or such as cannot be sent.
        ManifestMismatch: The memory of one was freed.
    """
    if isinstance(weights, Mapping):
        weights = weights.items()
    elif not isinstance(weights, Iterable) or isinstance(weights, str | bytes | torch.Tensor):
        raise InvalidInfo(
            "This cannot be sent",
            where="send",
            expected="a mapping of names to tensors, or an iterable of (name, tensor)",
            got=type(weights).__name__,
            cure="give {name: tensor}, or [(name, tensor)]",
        )
    for entry in weights:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise InvalidInfo(
                "This is not a name and a tensor",
                where="send",
                expected="(name, tensor)",
                got=type(entry).__name__,
                cure="give (name, tensor) pairs, or a mapping",
            )
        name, value = entry
        require_sendable(name, value, where="send")
        if is_gathered(value):
            # The other ranks would be left in it if this round failed half-way.
            raise InvalidInfo(
                f"Tensor {name!r} is spread over several ranks",
                where="send",
                expected="a full tensor",
                got=type(value).__name__,
                cure="gather it first, with full_tensor() on every rank; or connect with the module "
                "and push, which gathers",
            )
        tensor = whole(name, value, where="send")
        require_memory(name, tensor)
        yield name, tensor


def _require_described(name: Any, tensor: torch.Tensor) -> None:
    """As of any source, but that it may be on the meta device."""
    on_meta = tensor.device.type == "meta" and not is_lazy(tensor)
    require_sendable(name, torch.empty(0) if on_meta else tensor, where=_WHERE)
