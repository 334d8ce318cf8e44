"""Where the trainer's weights come from."""

from __future__ import annotations

import os
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_wt.deadline import ROUND_S, asked_for
from vllm_wt.errors import InvalidInfo
from vllm_wt.sources.announced import Announced
from vllm_wt.sources.base import WeightSource
from vllm_wt.sources.cast import Cast
from vllm_wt.sources.files import SafetensorsSource
from vllm_wt.sources.gathering import gathers_within
from vllm_wt.sources.tensors import ModuleSource, PairsSource, StateDictSource
from vllm_wt.sources.vllm_source import VllmSource, is_vllm_source

__all__ = [
    "Announced",
    "Cast",
    "ModuleSource",
    "PairsSource",
    "SafetensorsSource",
    "StateDictSource",
    "VllmSource",
    "WeightSource",
    "as_source",
    "take_part",
]

_ACCEPTED = (
    "a WeightSource, a torch.nn.Module, a mapping of names to tensors, a list of (name, tensor) "
    "pairs, or vLLM's own WeightSource"
)


def as_source(source: Any) -> WeightSource:
    """A source for what the caller has.

    Args:
        source: A `WeightSource`; a ``torch.nn.Module``, plain or with DTensors; a mapping of names
            to tensors; a list or another sequence of ``(name, tensor)`` pairs, or
            ``state.items()``; or a ``WeightSource`` of any vLLM release.

    Raises:
        InvalidInfo: None of these, among them a generator, which could be walked only once.
    """
    if isinstance(source, WeightSource):
        return source
    if isinstance(source, torch.nn.Module):
        return ModuleSource(source)
    if isinstance(source, Mapping):
        return StateDictSource(source)
    if is_vllm_source(source):
        return VllmSource(source)
    if isinstance(source, Sequence | ItemsView) and not isinstance(source, str | bytes):
        return PairsSource(source)
    raise InvalidInfo(
        "This cannot be a source of weights",
        where="source",
        expected=_ACCEPTED,
        got=f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__,
        cure=_cure(source),
    )


def take_part(source: Any, *, deadline_s: float = ROUND_S) -> None:
    """Walk a source once and keep nothing.

    For trainers whose tensors are gathered from several ranks (FSDP2, DTensors, a source of vLLM's that
    gathers): one rank has the `WeightSync`, and each other one calls this once for each of its pushes.
    It returns when that rank has made all of its tensors, which it does at the pace of the engines, or
    at once after a push that failed. So let the process group's timeout be longer than a push may take.
    Nothing is to be walked for connect, nor for a push whose arguments were refused, since those make
    nothing.

    Args:
        source: As of :func:`as_source`: the same on every rank.
        deadline_s: Seconds for the push, as of `WeightSync.push`.

    Raises:
        InvalidInfo: It is no source, or has what cannot be sent; or the deadline makes no sense.
        TransportError: A gather has failed, or an earlier one was left.
        Timeout: A rank has not come to a gather in time.
    """
    with gathers_within(asked_for(deadline_s)):
        tensors = iter(as_source(source))
        while next(tensors, None) is not None:  # none is held while the next one is made
            pass


def _cure(source: Any) -> str | None:
    if isinstance(source, Iterator):
        return (
            "it can be walked only once, and every push is a pass: give the module or the state "
            "dict itself, or a list"
        )
    if isinstance(source, str | os.PathLike):
        return "give vllm_wt.source.SafetensorsSource(folder) for a checkpoint folder"
    if isinstance(source, type):
        return "give an instance"
    return None
