"""WT-01 to WT-03: what a package says of itself."""

from __future__ import annotations

import json
import subprocess
import sys

from vllm_wt.spec import Capability, Kind
from vllm_wt.testing.conformance.gate import of_the_package
from vllm_wt.testing.conformance.harness import LONG_S, Harness

_IMPORT_S = 60
_ALLOWED = ("pluggy", "vllm_wt.errors", "vllm_wt.hookspecs", "vllm_wt.spec", "vllm_wt")
_REPORT = """
import importlib, json, sys
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@of_the_package
class PackageChecks:
    def test_the_entry_point_imports_nothing_heavy(self, harness: Harness) -> None:
        """WT-01"""
        module = harness.entry_point
        result = subprocess.run(
            [sys.executable, "-c", _REPORT, module],
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
            check=False,
        )
        assert result.returncode == 0, f"importing {module} fails:\n{result.stderr[-2000:]}"
        parents = {module.rsplit(".", depth)[0] for depth in range(module.count(".") + 1)}
        heavy = {
            name.partition(".")[0] if name.partition(".")[0] not in parents else name
            for name in json.loads(result.stdout.splitlines()[-1])
            if name not in parents
            and name not in _ALLOWED
            and not name.startswith("pluggy.")
            and name.partition(".")[0] not in {*sys.stdlib_module_names, "__mp_main__"}
        }
        assert not heavy, f"importing {module} imports {sorted(heavy)[:10]} too"

    def test_the_classes_exist_and_have_the_methods(self, harness: Harness) -> None:
        """WT-02"""
        problems = harness.package().problems(within=LONG_S)
        assert not problems, "; ".join(problems)

    def test_the_capabilities_are_those_of_the_class(self, harness: Harness) -> None:
        """WT-03"""
        spec = harness.spec
        claimed = {one for one in (Capability.CPU, Capability.CUDA) if one in spec.capabilities}
        assert claimed, "claim Capability.CPU or CUDA: a backend moves some kind of memory"
        if spec.kind is Kind.TRANSPORT:
            memory = harness.package().memory(within=LONG_S)
            assert {one.value for one in claimed} == set(memory) & {"cpu", "cuda"}, (
                f"the spec claims {sorted(one.value for one in claimed)}, and "
                f"properties.memory is {memory}"
            )
