"""The order in which workers take tensors: layer by layer."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.patterns import Ints

_NUMBER = re.compile(r"(?:^|\.)(\d{1,9})(?:\.|$)")


def layer_order(tensors: Sequence[TensorMeta]) -> Ints:
    """(tensors,) int64, the place of each tensor: by the first number in its name, then as given.

    A name without a number stays behind the tensor that it follows in the manifest: embeddings come
    first and the head last, whatever they are called.
    """
    layers, last = [], -1
    for meta in tensors:
        if (found := _NUMBER.search(meta.name)) is not None:
            last = int(found[1])
        layers.append(last)
    order = np.argsort(np.array(layers, dtype=np.int64), kind="stable")
    places = np.empty(len(layers), dtype=np.int64)
    places[order] = np.arange(len(layers))
    return places
