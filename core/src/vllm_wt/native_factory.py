"""Registering an engine of `vllm_wt.native` in code, as vLLM's own factory has it."""

from __future__ import annotations

import importlib.util
from typing import Any

from vllm_wt import registry
from vllm_wt.registry import Backend
from vllm_wt.spec import BackendSpec, Kind


class WeightTransferEngineFactory:
    """By the name and the method of vLLM's.

    What is registered is known to this process, and to those that are forked from it or, spawned,
    import its main module: call it at the top level there, or in a module imported there. Workers on
    other hosts, or of a server, need a package with an entry point instead.
    """

    @staticmethod
    def register_engine(
        name: str, module_path_or_cls: str | type[Any], class_name: str | None = None
    ) -> None:
        """Make an engine a backend of this process, and of its vLLM if it has one.

        Args:
            name: Of the backend.
            module_path_or_cls: The class, at the top level of a module; or that module.
            class_name: With a module: the class in it.

        Raises:
            PluginError: Another backend has that name.
            ValueError: The name or the class is not of the form that `BackendSpec` asks for.
        """
        if isinstance(module_path_or_cls, str):
            path = f"{module_path_or_cls}:{class_name}"
        else:
            path = f"{module_path_or_cls.__module__}:{module_path_or_cls.__qualname__}"
        spec = BackendSpec(name=name, kind=Kind.NATIVE, native=path, summary="registered in code")
        registry.default().add(Backend(spec, distribution="this process", version="-"))
        if importlib.util.find_spec("vllm") is not None:
            from vllm_wt.bridge.register import register

            register()
