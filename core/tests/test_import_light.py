"""What plugins and vLLM's processes import first must be light."""

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "numpy", "vllm", "pydantic"]
REPORT = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps([name for name in sys.argv[2:] if name in sys.modules]))
"""


def _heavy_after(module: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", REPORT, module, *HEAVY],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "module",
    [
        "vllm_wt",
        "vllm_wt.spec",
        "vllm_wt.hookspecs",
        "vllm_wt.errors",
        "vllm_wt.registry",
        "vllm_wt.bridge",
        "vllm_wt.cli",
    ],
)
def test_imports_nothing_heavy(module):
    assert _heavy_after(module) == []


def test_a_heavy_import_would_be_seen():
    assert {"torch", "numpy"} <= set(_heavy_after("vllm_wt.ranks"))
