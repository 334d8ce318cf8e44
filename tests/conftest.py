"""Puts what the tests share on the path, of this process and of vLLM's workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parent / "support")
sys.path.insert(0, SUPPORT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))
os.environ["UCX_NET_DEVICES"] = "lo"
