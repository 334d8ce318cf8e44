"""``vllm-wt bench commit``: what it prints, and that it counts only what is right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # the README's command is run by its own test


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_wt.cli", "bench", "commit"]
    return subprocess.run(
        [*command, "--megabytes", "150", "--rounds", "2"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_last_line_is_the_result(done):
    """Whether this host was quiet enough for the bound is not for a test to say."""
    summary, line = done.stdout.splitlines()
    result = json.loads(line)
    assert done.returncode == (0 if result["ok"] else 1)
    assert (result["name"], result["unit"], result["bound"]) == ("commit", "ms", 1.3)
    assert result["ok"] == (result["ratio"] <= result["bound"])
    assert len(result["samples"]["ours_s"]) == len(result["samples"]["baseline_s"]) == 2
    assert summary.startswith(f"{result['details']['megabytes']:.0f} MB in 14 tensors")


def test_every_module_of_the_model_was_written_directly(done):
    details = json.loads(done.stdout.splitlines()[-1])["details"]
    # Of one layer four linear ones and four norms; the embedding, the head and the last norm.
    assert details["modules_direct"] == 11
    # Embedding and head, q and o, k and v, three of the MLP, norms of the layer, of q and k, the last.
    elements = (
        2 * 32000 * 1024 + 1024 * 128 * (2 * 8 + 2 * 4) + 3 * 3072 * 1024 + 3 * 1024 + 2 * 128
    )
    assert details["megabytes"] == round(2 * elements / 1e6, 1)
    assert details["checked"] is True
