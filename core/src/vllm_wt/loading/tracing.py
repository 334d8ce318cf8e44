"""Tensors without storage that remember where their elements would come from.

The model's loaders run over them under a dispatch mode, below torch's Python functions: whatever
form a view is asked for in, only a few kinds of operation arrive here. Each is run on a tensor of
the meta device, the geometry. If the result shares the geometry's storage it is a view, whatever the
operation is called; only copies, and what writes, need to be known by name.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_wt.loading.lineage import (
    Bits,
    Made,
    NoRegionError,
    Opaque,
    Origin,
    Part,
    Source,
    pieces,
)
from vllm_wt.loading.plan import Cast, Copy, Fill
from vllm_wt.loading.regions import Loop, coalesced, dims, overlap, progressions
from vllm_wt.loading.targets import Target, Targets, key_of
from vllm_wt.manifest import Manifest
from vllm_wt.packing import DTYPES

aten = torch.ops.aten

_META = torch.device("meta")

_NOT_MODEL_CODE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


class ValueNeededError(BaseException):
    """The loader asks for values. Not an Exception, so that no handler of the model takes it."""

    def __init__(self, reason: str, names: Iterable[str]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.names = frozenset(names)


class RecordedTensor(torch.Tensor):
    """A tensor without storage: a view, given by its geometry, of an origin.

    It says that it is on the meta device. There a parameter that is given it for its data stays
    without memory; on any other device it would point nowhere, and reading it end the process.
    """

    _geometry: torch.Tensor
    _origin: Origin
    _tracer: Tracer

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Inside an operation that is taken apart, and in other threads, where the mode is not on.
        tracer = next(_recorded((args, kwargs)))._tracer
        return tracer.__torch_dispatch__(func, types, args, kwargs)

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        _need("numpy", self)

    def tolist(self) -> NoReturn:
        _need("tolist", self)

    def data_ptr(self) -> NoReturn:
        _need("data_ptr", self)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _need("__array__", self)

    def __dlpack__(self, *_: Any, **__: Any) -> NoReturn:
        _need("__dlpack__", self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list) or (
            isinstance(index, tuple) and any(isinstance(each, list) for each in index)
        ):
            # torch would put a list on our device, where it has no values.
            parts = index if isinstance(index, tuple) else (index,)
            index = tuple(
                torch.tensor(each, device="cpu") if isinstance(each, list) else each
                for each in parts
            )
        return super().__getitem__(index)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = memo[id(self)] = self.clone()  # torch's would copy the attributes above as well
        return copy

    def __reduce_ex__(self, _: Any) -> NoReturn:
        _need("pickle", self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{'+'.join(_names(self)) or '?'} {self.dtype} {list(self.shape)}>"

    def __format__(self, _: str) -> str:
        return repr(self)


def _recorded(args: Any) -> Iterator[RecordedTensor]:
    """The recorded tensors among arguments, in nested sequences and dictionaries too."""
    for arg in args.values() if isinstance(args, dict) else args:
        if type(arg) is RecordedTensor:
            yield arg
        elif isinstance(arg, (list, tuple, dict)):
            yield from _recorded(arg)


def _plain(args: Any) -> Iterator[torch.Tensor]:
    for arg in args.values() if isinstance(args, dict) else args:
        if isinstance(arg, torch.Tensor):
            if type(arg) is not RecordedTensor:
                yield arg
        elif isinstance(arg, (list, tuple, dict)):
            yield from _plain(arg)


def _names(*tensors: RecordedTensor) -> frozenset[str]:
    return frozenset(name for tensor in tensors for name in tensor._origin.names())


def _need(what: str, *tensors: RecordedTensor) -> NoReturn:
    raise ValueNeededError(f"{what} at {_caller()}", _names(*tensors))


def _caller() -> str:
    """File and line of the model's code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_MODEL_CODE):
        frame = frame.f_back
    return f"{os.sep.join(frame.f_code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno}"


class _Kind:
    """What is known of an operation by its schema."""

    __slots__ = ("composite", "name", "view", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.rpartition("::")[2]
        self.writes = [
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        )
        self.view = not self.composite and any(
            result.alias_info is not None for result in schema.returns
        )

    def written(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found = [args[n] if n < len(args) else kwargs.get(name) for n, name in self.writes]
        return [*_recorded(found), *_plain(found)]


_KINDS: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    kind = _KINDS.get(func)
    if kind is None:
        kind = _KINDS[func] = _Kind(func)
    return kind


_METADATA = {
    aten.is_same_size.default,
    aten._has_compatible_shallow_copy_type.default,
}
"""Operations that answer without looking at values."""

_Stain = tuple[frozenset[str], str]
"""Names of the checkpoint tensors that memory of the model's own depends on, and how."""


class _Stained:
    __slots__ = ("names", "pending", "reason", "storage")

    def __init__(
        self, storage: torch.UntypedStorage, names: frozenset[str], reason: str, pending: bool
    ) -> None:
        self.storage = storage  # held, as its address is the key
        self.names = names
        self.reason = reason
        self.pending = pending


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is written to the targets while it is on. Nothing is written to them.

    Args:
        targets: What is to be loaded.

    Attributes:
        fallbacks: Reasons and source names by module.
        copies: In order, each with its target. Fills are kept by the targets.
        bypassing: Names of targets that something else than their weight loader has written.
    """

    def __init__(self, targets: Targets) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fallbacks: dict[str, tuple[dict[str, None], set[str]]] = {}
        self.copies: list[tuple[Target, Copy]] = []
        self.bypassing: set[str] = set()
        self._targets = targets
        self._stains: dict[int, _Stained] = {}
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._loading: list[tuple[Target, Any]] = []

    def sources(self, manifest: Manifest) -> Iterator[tuple[str, RecordedTensor]]:
        """The checkpoint's tensors, for the model's loaders. Call it before this mode is on."""
        geometries = deque(
            torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device=_META)
            for meta in manifest.tensors
        )
        return (
            (meta.name, self._tensor(geometries.popleft(), Source(meta.name)))
            for meta in manifest.tensors
        )

    def loader(self, target: Target, loader: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a weight loader: if it needs values, its module falls back, and the load goes on."""

        def loading(*args: Any, **kwargs: Any) -> Any:
            self._loading.append((target, (args, kwargs)))
            try:
                return loader(*args, **kwargs)
            except ValueNeededError as error:
                self.fall_back(target, error.reason, error.names)
            except RuntimeError as error:
                if not replaces_data(error):
                    raise
                self.fall_back(target, f"replaces the data at {_caller()}", ())
            finally:
                self._loading.pop()
            return True  # loaders that return something return whether they took the tensor

        return loading

    def fall_back(self, target: Target, reason: str, names: Iterable[str]) -> None:
        """Leave every module that has this parameter to the model's own loader."""
        for module in target.modules:
            self.fall_back_module(module, reason, names)

    def fall_back_module(self, module: str, reason: str, names: Iterable[str]) -> None:
        reasons, sources = self.fallbacks.setdefault(module, ({}, set()))
        reasons[reason] = None
        sources.update(names)
        if self._loading:
            sources.update(_names(*_recorded(self._loading[-1][1])))

    # -- dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if RecordedTensor not in types:
            return self._on_plain(func, args, kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        kind = _kind(func)
        if kind.writes:
            return self._on_write(func, kind, args, kwargs)
        if kind.composite:
            # Without autograd (in inference mode) torch does not take it apart itself.
            return func.decompose(*args, **kwargs)
        return self._compute(func, kind, args, kwargs)

    def _compute(self, func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        if kind.view and not kwargs and type(args[0]) is RecordedTensor:
            # The usual case, made fast: a view by torch's own word.
            out = func(args[0]._geometry, *args[1:])
            if type(out) is torch.Tensor and _same_elements(out, args[0]._geometry):
                return self._tensor(out, args[0]._origin)
        tensors = list(_recorded((args, kwargs)))
        out = self._run(func, kind, tensors, args, kwargs)
        made: Opaque | None = None

        def wrap(value: Any) -> Any:
            nonlocal made
            if isinstance(value, (list, tuple)):
                return type(value)(map(wrap, value))
            if not isinstance(value, torch.Tensor):
                return value
            key = key_of(value)
            for tensor in tensors:
                if key == key_of(tensor._geometry) and _same_elements(value, tensor._geometry):
                    return self._tensor(value, tensor._origin)
            if made is None:
                made = Opaque(f"{kind.name} at {_caller()}", _names(*tensors))
            return self._tensor(value, made)

        return wrap(out)

    def _run(
        self, func: Any, kind: _Kind, tensors: list[RecordedTensor], args: Any, kwargs: Any
    ) -> Any:
        """Run an operation on the geometries, for shapes and dtypes."""
        try:
            return func(*_on_meta(args), **_on_meta(kwargs))
        except NotImplementedError:
            # The shape, or whatever it returns, depends on values.
            _need(kind.name, *tensors)
        except RuntimeError as error:
            if "meta tensor" not in str(error):
                raise
            _need(kind.name, *tensors)  # it is made of several, one of which is item

    def _tensor(self, geometry: torch.Tensor, origin: Origin) -> RecordedTensor:
        if geometry.is_inference() or not torch.is_inference_mode_enabled():
            tensor = _wrapper(geometry)
        else:
            # A view of a tensor from outside of inference mode cannot be an inference tensor.
            with torch.inference_mode(False):
                tensor = _wrapper(geometry)
        tensor._geometry = geometry
        tensor._origin = origin
        tensor._tracer = self
        return tensor

    # -- copies: new memory, the same elements

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        source: RecordedTensor = args[0]
        kwargs = {k: v for k, v in kwargs.items() if k not in {"device", "pin_memory"}}
        geometry = func(source._geometry, *args[1:], **kwargs)
        if isinstance(source._origin, Opaque):
            return self._tensor(geometry, source._origin)
        cast = None
        if geometry.dtype != source.dtype:
            cast = Cast(_name(geometry.dtype))
        return self._made(geometry, 0, [(source, source._geometry)], cast)

    def _made(
        self,
        geometry: torch.Tensor,
        axis: int,
        slabs: Iterable[tuple[RecordedTensor, torch.Tensor]],
        cast: Cast | None = None,
    ) -> RecordedTensor:
        """New memory, filled with views of recorded tensors one after the other along an axis."""
        if not Made.fits(geometry.shape, geometry.stride()):
            geometry = torch.empty(geometry.shape, dtype=geometry.dtype, device=_META)
        parts, stop = [], 0
        for tensor, view in slabs:
            if view.numel():
                stop += view.shape[axis] if view.ndim else 1
                offset = int(view.storage_offset())
                parts.append(Part(stop, tensor._origin, offset, view.stride()))
        origin: Origin = Made(geometry.shape, geometry.stride(), axis, parts, cast)
        return self._tensor(geometry, origin)

    def _reinterpreted(self, func: Any, args: Any, kwargs: Any) -> Any:
        source: RecordedTensor = args[0]
        geometry = func(source._geometry, *args[1:], **kwargs)
        if geometry.dtype == source.dtype:
            return self._tensor(geometry, source._origin)
        if geometry.element_size() != source.element_size():
            reason = f"view of elements of another size at {_caller()}"
            return self._tensor(geometry, Opaque(reason, _names(source)))
        return self._tensor(geometry, Bits(source._origin, Cast(_name(geometry.dtype), bits=True)))

    def _joined(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors, dim = list(args[0]), _argument(args, kwargs, 1, "dim", 0)
        if func is aten.stack.default:
            dim = dim % (tensors[0].ndim + 1)
            tensors = [tensor.unsqueeze(dim) for tensor in tensors]
            func = aten.cat.default
        # An old rule: cat passes over empty tensors of one dimension.
        filled = [t for t in tensors if t.shape != (0,)] or tensors
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1 or any(type(t) is not RecordedTensor for t in filled):
            return self._compute(func, _kind(func), (tensors, dim), {})
        geometry = func([tensor._geometry for tensor in filled], dim)
        return self._made(geometry, dim % geometry.ndim, [(t, t._geometry) for t in filled])

    def _indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = args[0]
        found = None
        if type(source) is RecordedTensor:
            if func is aten.index_select.default:
                found = self._index(source, [None] * (args[1] % max(source.ndim, 1)) + [args[2]])
            else:
                found = self._index(source, args[1])
        if found is None:
            return self._by_values(func, args, kwargs)
        dim, index = found
        shape = (*source.shape[:dim], len(index), *source.shape[dim + 1 :])
        geometry = torch.empty(shape, dtype=source.dtype, device=_META)
        slabs = [
            (source, _every(source._geometry, dim, first, step, count))
            for first, step, count in progressions(index)
        ]
        return self._made(geometry, dim, slabs)

    def _by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An index that is not understood: opaque, if the shape can be told without values."""
        kind = _kind(func)
        tensors = list(_recorded((args, kwargs)))
        for index in args[1] if isinstance(args[1], (list, tuple)) else args[2:3]:
            if index is not None and index.dtype in {torch.bool, torch.uint8}:
                _need(f"{kind.name} by a mask", *tensors)
        return self._compute(func, kind, args, kwargs)

    def _index(
        self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
    ) -> tuple[int, list[int]] | None:
        """An index of one dimension by known values, as that dimension and the places in it."""
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1:
            return None
        dim, index = given[0]
        if index.is_meta and key_of(index) in self._moved:
            # Moved to the device that a recorded tensor says it is on.
            there, here = self._moved[key_of(index)]
            index = here if there is index else index
        if (
            index.is_meta
            or index.ndim != 1
            or dim >= tensor.ndim
            or self._stain([index]) is not None
        ):
            return None
        size = tensor.shape[dim]
        if index.dtype == torch.bool:
            if len(index) != size:
                return None
            index = index.nonzero().flatten()
        elif index.dtype == torch.uint8:
            return None
        places = index.tolist()
        if any(not -size <= place < size for place in places):
            raise IndexError(f"index out of range for dimension {dim} of size {size}")
        return dim, [place % size for place in places]

    def _repeated(self, func: Any, args: Any, kwargs: Any) -> Any:
        source, repeats = args
        lead = len(repeats) - source.ndim
        shape = [1] * lead + list(source.shape)
        paired = [n for size in shape for n in (1, size)]
        wide = [n for count, size in zip(repeats, shape, strict=True) for n in (count, size)]
        sizes = [count * size for count, size in zip(repeats, shape, strict=True)]
        return source.reshape(paired).expand(wide).reshape(sizes)

    # -- writes

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        dest, source = args[0], args[1]
        if type(dest) is RecordedTensor or type(source) is not RecordedTensor:
            return self._on_write(func, _kind(func), args, kwargs)
        self._store(dest, source, source._geometry)
        return dest

    def _store(self, dest: torch.Tensor, source: RecordedTensor, geometry: torch.Tensor) -> None:
        """Note that ``dest`` gets the elements that ``geometry`` views of the source's origin."""
        if geometry.shape != dest.shape:
            geometry = geometry.expand(dest.shape)
        target = self._targets.find(dest)
        if target is None:
            reason = f"copied to a tensor that is no parameter, at {_caller()}"
            self._soil(dest, (_names(source), reason), pending=True)
            return
        if dest.dtype != target.dtype:
            self.fall_back(target, f"view as {dest.dtype} written at {_caller()}", _names(source))
            return
        if dest.numel() == 0:
            return
        self._note_writer(target)
        if source._origin.constant is not None and not _overlaps_itself(dest):
            self._fill(target, dest, source._origin.constant)
            return
        loops = list(zip(dest.shape, geometry.stride(), dest.stride(), strict=True))
        if any(count > 1 and write == 0 for count, _, write in loops):
            reason = f"expanded parameter written at {_caller()}"
            self.fall_back(target, reason, _names(source))
            return
        first = int(dest.storage_offset()) - target.first
        try:
            found = pieces(source._origin, int(geometry.storage_offset()), first, loops)
        except NoRegionError as error:
            self.fall_back(target, str(error), _names(source))
            return
        for piece in found:
            self._note(target, piece.name, piece.read, piece.write, piece.loops, piece.casts)

    def _note_writer(self, target: Target) -> None:
        if not any(loaded is target for loaded, _ in self._loading):
            self.bypassing.add(target.name)

    def _note(
        self,
        target: Target,
        name: str,
        read: int,
        write: int,
        loops: Sequence[Loop],
        casts: tuple[Cast, ...],
    ) -> None:
        loops = coalesced(loops)
        module, parameter = target.names[0]
        copy = Copy(
            name,
            read,
            tuple(loop[1] for loop in loops),
            casts,
            module,
            parameter,
            write,
            tuple(loop[2] for loop in loops),
            _name(target.dtype),
            tuple(loop[0] for loop in loops),
        )
        target.copies.append(copy)
        self.copies.append((target, copy))

    def _filled_with(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._copy(aten.copy_.default, args, kwargs)

    def _index_written(self, func: Any, args: Any, kwargs: Any) -> Any:
        dest = args[0]
        if func is aten.index_copy_.default:
            indices, source = [None] * (args[1] % max(dest.ndim, 1)) + [args[2]], args[3]
            add = False
        else:
            indices, source = args[1], args[2]
            add = _argument(args, kwargs, 3, "accumulate", False)
        found = None
        if not add and type(dest) is not RecordedTensor and type(source) is RecordedTensor:
            found = self._index(dest, indices)
        if found is None:
            return self._on_write(func, _kind(func), args, kwargs)
        dim, index = found
        shape = (*dest.shape[:dim], len(index), *dest.shape[dim + 1 :])
        geometry = source._geometry.expand(shape)
        at = 0
        for first, step, count in progressions(index):
            at += count
            taken = count if step else 1  # the last of those for one place
            part = geometry.narrow(dim, at - taken, taken)
            self._store(_every(dest, dim, first, step or 1, taken), source, part)
        return dest

    def _on_write(self, func: Any, kind: _Kind, args: Any, kwargs: Any) -> Any:
        """Anything else that writes, and has to do with recorded tensors."""
        tensors = list(_recorded((args, kwargs)))
        written = kind.written(args, kwargs)
        reason = f"{kind.name} at {_caller()}"
        names = _names(*tensors)
        if stain := self._stain(_plain((args, kwargs))):
            names |= stain[0]
        recorded = [tensor for tensor in written if type(tensor) is RecordedTensor]
        if len(recorded) == len(written):
            before = [(tensor.shape, tensor.stride()) for tensor in recorded]
            self._run(func, kind, tensors, args, kwargs)
            if before != [(t._geometry.shape, t._geometry.stride()) for t in recorded]:
                _need(kind.name, *tensors)
        for tensor in written:
            if type(tensor) is RecordedTensor:
                if kind.name != "detach_":
                    tensor._origin.spoil(reason, names)
                    if _is_all(tensor._geometry):
                        tensor._origin.constant = _rounded(_constant(func, args), tensor.dtype)
            elif target := self._targets.find(tensor):
                self._note_writer(target)
                self.fall_back(target, reason, names)
            else:
                self._soil(tensor, (names, reason), pending=True)
        return written[0] if written and func._schema.returns else None

    # -- operations without recorded tensors

    def _on_plain(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = _kind(func)
        if kind.writes and (written := kind.written(args, kwargs)):
            return self._on_plain_write(func, kind, written, args, kwargs)
        if func in _VALUES and args[0].is_meta:
            stain = self._stain(args[:1])
            raise ValueNeededError(f"{kind.name} at {_caller()}", stain[0] if stain else ())
        out = func(*args, **kwargs)
        if kind.view:
            return out
        if func in _MOVES and out.is_meta and not args[0].is_meta and out.ndim == 1:
            self._moved[key_of(out)] = (out, args[0].clone())
        results = list(_plain((out,)))
        keys = {key_of(tensor) for tensor in results}
        others = [tensor for tensor in _plain((args, kwargs)) if key_of(tensor) not in keys]
        if not (stain := self._stain(others)):
            return out
        for tensor in results:
            if not self._targets.has(key_of(tensor)):
                self._soil(tensor, stain, pending=False)
        if not results and out is not None and func not in _METADATA:
            raise ValueNeededError(f"{kind.name} at {_caller()}", stain[0])
        return out

    def _on_plain_write(
        self, func: Any, kind: _Kind, written: list[torch.Tensor], args: Any, kwargs: Any
    ) -> Any:
        targets = [self._targets.find(tensor) for tensor in written]
        for tensor in written if self._moved else ():
            self._moved.pop(key_of(tensor), None)
        if kind.name in {"detach_", "requires_grad_"}:
            return func(*args, **kwargs)
        ids = {id(tensor) for tensor in written}
        stain = self._stain(t for t in _plain((args, kwargs)) if id(t) not in ids)
        if not any(targets):
            out = func(*args, **kwargs)
            if stain:
                for tensor in written:
                    self._soil(tensor, stain, pending=True)
            return out
        # The targets may be the live model's: nothing is executed.
        for tensor, target in zip(written, targets, strict=True):
            if target is None:
                self._soil(tensor, stain or (frozenset(), kind.name), pending=True)
                continue
            self._note_writer(target)
            value = None if stain else _constant(func, args)
            if value is None or tensor.dtype != target.dtype or _overlaps_itself(tensor):
                reason = f"{kind.name} at {_caller()}"
                names: frozenset[str] = frozenset()
                if stain:
                    reason, names = f"{reason} ({stain[1]})", stain[0]
                self.fall_back(target, reason, names)
            elif tensor.numel():
                self._fill(target, tensor, value)
        return written[0] if func._schema.returns else None

    def _fill(
        self, target: Target, tensor: torch.Tensor, value: bool | int | float | complex
    ) -> None:
        loops = coalesced((n, 0, stride) for n, stride in dims(tensor.shape, tensor.stride()))
        strides = tuple(loop[2] for loop in loops)
        shape = tuple(loop[0] for loop in loops)
        first = int(tensor.storage_offset()) - target.first
        module, parameter = target.names[0]
        target.fills.append(Fill(module, parameter, first, strides, shape, value))
        if target.copies and overlap(
            [(c.dest_offset, dims(c.shape, c.dest_strides)) for c in target.copies],
            (first, dims(shape, strides)),
        ):
            self.fall_back(target, f"a constant over what was copied, at {_caller()}", ())

    # -- memory of the model's own that depends on the checkpoint

    def _soil(self, tensor: torch.Tensor, stain: _Stain, pending: bool) -> None:
        """Note what memory that is no parameter depends on.

        Args:
            tensor: Any view of it.
            stain: Names and reason.
            pending: Whether somebody has to read it: else the plan would leave it as it is.
        """
        storage = tensor.untyped_storage()
        if pending and self._loading:
            self.fall_back(self._loading[-1][0], stain[1], stain[0])
            pending = False
        known = self._stains.get(storage._cdata)
        if known is None:
            self._stains[storage._cdata] = _Stained(storage, *stain, pending)
        else:
            known.names |= stain[0]
            known.pending |= pending

    def pending(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Reason and names of memory that depends on the checkpoint and went to no parameter."""
        for stained in self._stains.values():
            if stained.pending:
                yield stained.reason, stained.names

    def _stain(self, tensors: Iterable[torch.Tensor]) -> _Stain | None:
        """What tensors depend on that was not really written: their values say nothing."""
        names: frozenset[str] = frozenset()
        reason = None
        for tensor in tensors:
            key = key_of(tensor)
            if (stained := self._stains.get(key)) is not None:
                stained.pending = False  # whatever reads it depends on it in turn
                names, reason = names | stained.names, stained.reason
            for target in self._targets.at(key):
                if target.copies or target.fills:
                    names |= {copy.source for copy in target.copies}
                    reason = f"reads {target.name}"
        return None if reason is None else (names, reason)


def _wrapper(geometry: torch.Tensor) -> RecordedTensor:
    return torch.Tensor._make_wrapper_subclass(
        RecordedTensor,
        geometry.shape,
        strides=geometry.stride(),
        storage_offset=geometry.storage_offset(),
        dtype=geometry.dtype,
        device=_META,
    )


def _on_meta(args: Any) -> Any:
    """Arguments with every tensor replaced by one on the meta device, for shapes only."""
    if isinstance(args, dict):
        return {
            key: _META if key == "device" and value is not None else _on_meta_one(value)
            for key, value in args.items()
            if key != "pin_memory"
        }
    return [_on_meta_one(arg) for arg in args]


def _on_meta_one(arg: Any) -> Any:
    if type(arg) is RecordedTensor:
        return arg._geometry
    if isinstance(arg, torch.Tensor):
        return arg.to(_META)
    if isinstance(arg, (list, tuple)):
        return type(arg)(map(_on_meta_one, arg))
    return arg


def _same_elements(value: torch.Tensor, geometry: torch.Tensor) -> bool:
    """Whether a tensor in the same storage has elements of the same meaning."""
    return value.dtype == geometry.dtype and not value.is_neg() and not value.is_conj()


def _every(tensor: torch.Tensor, dim: int, first: int, step: int, count: int) -> torch.Tensor:
    """A view of places ``first``, ``first + step`` and so on along one dimension."""
    sizes, strides = list(tensor.shape), list(tensor.stride())
    offset = tensor.storage_offset() + first * strides[dim]
    sizes[dim], strides[dim] = count, strides[dim] * step
    return tensor.as_strided(sizes, strides, offset)


def _constant(func: Any, args: Any) -> bool | int | float | complex | None:
    """The value that an operation fills a tensor with, if it does."""
    if func is aten.zero_.default:
        return 0
    if func is aten.fill_.Scalar:
        return args[1]  # type: ignore[no-any-return]
    if func is aten.fill_.Tensor and not args[1].is_meta:
        return args[1].item()  # type: ignore[no-any-return]
    return None


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """What a tensor of a dtype holds after it was filled with a value."""
    return None if value is None else torch.full((), value, dtype=dtype, device="cpu").item()


def _is_all(tensor: torch.Tensor) -> bool:
    """Whether a view has every element of its memory."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(n > 1 and stride == 0 for n, stride in dims(tensor.shape, tensor.stride()))


def _argument(args: Any, kwargs: Any, place: int, name: str, default: Any) -> Any:
    return args[place] if place < len(args) else kwargs.get(name, default)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def replaces_data(error: RuntimeError) -> bool:
    """Whether torch refused to make a recorded tensor the data of a parameter with memory."""
    return "variable.set_data" in str(error)


def _value(tracer: Tracer, func: Any, args: Any, kwargs: Any) -> NoReturn:
    _need(_kind(func).name.lstrip("_"), *_recorded((args, kwargs)))


_VALUES = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}

_MOVES = {aten._to_copy.default, aten.to.device, aten.to.dtype_layout, aten.to.other}

_SPECIAL: dict[Any, Callable[[Tracer, Any, Any, Any], Any]] = {
    aten.copy_.default: Tracer._copy,
    aten.fill_.Tensor: Tracer._filled_with,
    aten.index_put_.default: Tracer._index_written,
    aten.index_copy_.default: Tracer._index_written,
    aten.clone.default: Tracer._copied,
    aten._to_copy.default: Tracer._copied,
    aten.view.dtype: Tracer._reinterpreted,
    aten.cat.default: Tracer._joined,
    aten.stack.default: Tracer._joined,
    aten.index.Tensor: Tracer._indexed,
    aten.index_select.default: Tracer._indexed,
    aten.repeat.default: Tracer._repeated,
    aten._has_compatible_shallow_copy_type.default: _value,
    aten.equal.default: _value,
    **dict.fromkeys(_VALUES, _value),
}
"""What makes new memory of the same elements, writes, or needs values. Views are not listed."""
