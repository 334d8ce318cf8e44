"""What test_apply.py asks of vLLM's workers about how weights get into each module."""

from __future__ import annotations

from typing import Any

from wt_faults import FaultExtension


class ApplyExtension(FaultExtension):
    """Runs inside a worker, where ``self`` is the worker itself."""

    def wt_report(self) -> dict[str, Any]:
        """Which modules are written directly, which are reloaded by vLLM, and why."""
        return self.weight_transfer_engine.round._loader.report()

    def wt_kinds(self) -> dict[str, str]:
        """What each module is that has parameters of its own, and of no module before it.

        The class of its quantization method, or where it has none its own; for a mixture's experts
        the name of the kernels' backend too, which decides on their layout.
        """
        seen: set[int] = set()
        kinds = {}
        for name, module in self.model_runner.get_model().named_modules():
            own = {id(param) for param in module.parameters(recurse=False)} - seen
            seen |= own
            if own:
                method = getattr(module, "quant_method", None)
                backend = getattr(method, "unquantized_backend", None) or getattr(
                    method, "fp8_backend", None
                )
                words = [
                    type(module if method is None else method).__name__,
                    getattr(backend, "name", ""),
                ]
                kinds[name] = " ".join(filter(None, words))
        return kinds

    def wt_scales(self) -> dict[str, list[float]]:
        """The scales that FP8 weights were divided by."""
        return {
            name: param.detach().float().reshape(-1).tolist()
            for name, param in self.model_runner.get_model().named_parameters()
            if name.endswith("weight_scale")
        }
