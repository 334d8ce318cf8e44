"""``vllm-wt bench overlap``, small: what it prints, and that it counts only what is right."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_last_line_is_the_result():
    """Whether this host was quiet enough for the bounds is not for a test to say."""
    command = [sys.executable, "-m", "vllm_wt.cli", "bench", "overlap"]
    done = subprocess.run(
        [*command, "--megabytes", "156", "--rounds", "2"],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.stdout, done.stderr
    summary, line = done.stdout.splitlines()
    result = json.loads(line)
    details, samples = result["details"], result["samples"]
    assert done.returncode == (0 if result["ok"] else 1)
    assert (result["name"], result["unit"], result["bound"]) == ("overlap", "ms", 1.5)
    assert details["checked"] is True
    assert result["ok"] == (
        result["ratio"] <= result["bound"] and details["tokens_ratio"] >= details["tokens_bound"]
    )
    assert len(samples["ours_s"]) == len(samples["baseline_s"]) == 2
    assert details["wire_mb_s"] <= 200.0  # as slow as it is meant to be, or slower
    assert min(samples["tokens_s_during"]) > 0
    assert summary.startswith(f"{details['megabytes']:.0f} MB at {details['wire_mb_s']:.0f} MB/s")
