"""Tests of one group run in one process: otherwise each starts the engines that they share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import os, pathlib, pytest

pytestmark = pytest.mark.xdist_group("shared")

@pytest.mark.parametrize("number", range(8))
def test_one(number):
    (pathlib.Path(__file__).parent / f"{os.getpid()}").touch()
"""


def test_a_group_is_run_by_one_process(tmp_path: Path) -> None:
    """With pytest 9.2, xdist 3.8 forgets the groups without a word."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = xdist_group(name): one process\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "test_it.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "8 passed" in done.stdout, done.stdout + done.stderr
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 1
