"""Puts what the tests share on the path, of this process and of vLLM's workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

SUPPORT = str(Path(__file__).parent / "support")
sys.path.insert(0, SUPPORT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))
os.environ["UCX_NET_DEVICES"] = "lo"

# The models are small, and vLLM's workers spin between calls: on two cores, several threads that
# compute would wait for each other and for them.
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that start from here on
torch.set_num_threads(1)
