"""For tests only: importing this leaves vLLM's weights on a CPU as they come out of a checkpoint.

vLLM packs the weights of its CPU kernels into memory of its own and leaves an empty parameter behind,
so nothing could be written into them in place. On a GPU they are plain parameters. With this, linear
layers and heads compute by ``torch.nn.functional.linear`` over their parameters on a CPU too, so that
what is written there, and how, can be tested without a GPU.

It is in effect for the whole process from then on, on models that are loaded later, and makes them
slower. Experts stay packed: their CPU kernel takes nothing else.
"""

from __future__ import annotations

from typing import Any

import vllm._custom_ops
from vllm.model_executor.layers import utils


def _never(*args: Any) -> bool:
    return False


vllm._custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = _never


class UnpackedWeights:
    """Carries the import into vLLM's workers, as their ``worker_extension_cls``.

    Workers import it before they are made, and so before the model is loaded.
    """
