"""Doing what a plan says to tensors of a test: from full tensors, and from slices of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_wt.loading.apply import DirectWrites
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.slices import Slices, sliced
from vllm_wt.packing import as_bytes, view_as

Tensors = Mapping[str, torch.Tensor]

# Gap, alignment and most runs: exact slices, coarser ones, as few as there can be.
SLICINGS = ((0, 1, 1 << 20), (8, 16, 1 << 20), (0, 1, 1))


def cut(slices: Slices, sources: Tensors) -> dict[str, torch.Tensor]:
    """What a reader of the slices has of full tensors."""
    parts = {}
    for meta in slices.plan.manifest.tensors:
        full = as_bytes(sources[meta.name].contiguous())
        runs = [full[at : at + nbytes] for at, nbytes in slices.runs[meta.name]]
        parts[meta.name] = view_as(torch.cat([full[:0], *runs]), meta)
    return parts


def replay(plan: LoadPlan, sources: Tensors, parameters: Tensors) -> None:
    """Write parameters, by full name, as the plan says; any slices of the sources do the same."""
    written = {name: parameters[name] for name in plan.parameters}
    before = {name: tensor.clone() for name, tensor in written.items()}
    DirectWrites(plan, written).run(sources)
    for gap, alignment, most in SLICINGS:
        slices = sliced(plan, gap, alignment, most)
        again = {name: tensor.clone() for name, tensor in before.items()}
        DirectWrites(slices.plan, again).run(cut(slices, sources))
        for name, tensor in written.items():
            assert torch.equal(as_bytes(again[name].contiguous()), as_bytes(tensor.contiguous())), (
                name,
                gap,
                alignment,
                most,
            )
