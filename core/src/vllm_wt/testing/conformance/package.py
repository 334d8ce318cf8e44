"""A process that imports a backend's classes and looks at them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from vllm_wt import native, registry
from vllm_wt.backends import transport_named
from vllm_wt.engine import TrainerWeightTransferEngine, WeightTransferEngine
from vllm_wt.spec import Kind
from vllm_wt.transport import MappingTransport, Transport


class Package:
    """What a check asks of the classes of one backend.

    Args:
        backend: Which.
        transport: Which of its Transports; empty for the default.
    """

    def __init__(self, backend: str, transport: str = "") -> None:
        self._spec = registry.default().get(backend).spec
        self._transport = transport

    def problems(self) -> list[str]:
        """What the classes lack to be called as the contract says."""
        spec = self._spec
        found: list[str] = []
        if spec.kind is Kind.TRANSPORT:
            path = spec.transports.get(self._transport, str(spec.transport))
            found += self._problems(path, Transport)
            if self.maps():
                found += self._problems(path, MappingTransport)
        if spec.kind is Kind.ENGINE:
            found += self._problems_of_class(str(spec.worker), WeightTransferEngine)
            found += self._problems_of_class(str(spec.trainer), TrainerWeightTransferEngine)
        if spec.native is not None:
            found += self._problems_of_class(spec.native, native.WeightTransferEngine)
            cls = registry.resolve(spec.native, backend=spec.name)
            for name in ("init_info_cls", "update_info_cls"):
                if not hasattr(cls, name):
                    found.append(f"{spec.native} has no {name}")
        return found

    def memory(self) -> list[str]:
        """Device types in the properties of a Transport."""
        return sorted(transport_named(self._spec, self._transport).properties.memory)

    def maps(self) -> bool:
        """Whether a Transport says that readers can map an owner's memory; an engine does not say."""
        if self._spec.kind is not Kind.TRANSPORT:
            return False
        cls = transport_named(self._spec, self._transport)
        return bool(getattr(getattr(cls, "properties", None), "maps", False))

    def _problems_of_class(self, path: str, contract: type[Any]) -> Iterator[str]:
        """Of one that must derive from the contract."""
        cls = registry.resolve(path, backend=self._spec.name)
        if not (isinstance(cls, type) and issubclass(cls, contract)):
            yield f"{path} does not derive from {contract}"
            return
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            yield f"{path} lacks {missing}"
        yield from self._problems(path, contract)

    def _problems(self, path: str, contract: type[Any]) -> Iterator[str]:
        cls = registry.resolve(path, backend=self._spec.name)
        for name, method in vars(contract).items():
            # Each Protocol has an __init__, if only Python's own.
            counts = name == "__init__" and contract is not MappingTransport
            if isinstance(method, staticmethod):
                yield from _differs(cls, name, method.__func__, static=True)
            elif inspect.isfunction(method) and (counts or not name.startswith("_")):
                yield from _differs(cls, name, method)


def _differs(cls: Any, name: str, contract: Any, *, static: bool = False) -> Iterator[str]:
    title = f"{getattr(cls, '__name__', cls)}.{name}"
    method = getattr(cls, name, None)
    if not callable(method):
        yield f"there is no method {title}"
        return
    wanted = list(inspect.signature(contract).parameters.values())
    have = inspect.signature(method)
    args = [None for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = {p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY}
    if not static and not inspect.isfunction(inspect.getattr_static(cls, name)):
        args = args[1:]
    try:
        have.bind(*args, **keywords)
    except TypeError as error:
        as_called = f"{name}{inspect.signature(contract)}"
        yield f"{title}{have} cannot be called as {as_called}: {error}"
