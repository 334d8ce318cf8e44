"""Doing what a plan says to tensors of a test: from full tensors, slices of them, and batches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm_wt.loading.apply import DirectWrites
from vllm_wt.loading.batches import batch_of, batches
from vllm_wt.loading.plan import LoadPlan
from vllm_wt.loading.slices import Slices, sliced
from vllm_wt.packing import as_bytes, view_as

Tensors = Mapping[str, torch.Tensor]

# Gap, alignment and most runs: exact slices, coarser ones, as few as there can be.
SLICINGS = ((0, 1, 1 << 20), (8, 16, 1 << 20), (0, 1, 1))
BATCHES = (0, 64)


def cut(slices: Slices, sources: Tensors) -> dict[str, torch.Tensor]:
    """What a reader of the slices has of full tensors."""
    parts = {}
    for meta in slices.plan.manifest.tensors:
        full = as_bytes(sources[meta.name].contiguous())
        runs = [full[at : at + nbytes] for at, nbytes in slices.runs[meta.name]]
        parts[meta.name] = view_as(torch.cat([full[:0], *runs]), meta)
    return parts


def replay(plan: LoadPlan, sources: Tensors, parameters: Tensors) -> None:
    """Write parameters, by full name, as the plan says; slices and batches do the same."""
    written = {name: parameters[name] for name in plan.parameters}
    before = {name: tensor.clone() for name, tensor in written.items()}
    DirectWrites(plan, written).run(sources)
    for gap, alignment, most in SLICINGS:
        slices = sliced(plan, gap, alignment, most)
        again = {name: tensor.clone() for name, tensor in before.items()}
        DirectWrites(slices.plan, again).run(cut(slices, sources))
        _assert_equal(again, written, (gap, alignment, most))
    for nbytes in BATCHES:
        again = {name: tensor.clone() for name, tensor in before.items()}
        _write_in_batches(plan, nbytes, sources, again)
        _assert_equal(again, written, nbytes)


def _write_in_batches(plan: LoadPlan, nbytes: int, sources: Tensors, parameters: Tensors) -> None:
    """Each from its own tensors alone."""
    parts = batches(plan, nbytes)
    number = batch_of(plan, parts)
    for n, part in enumerate(parts):
        own = {
            name: parameters[name] for name, p in plan.parameters.items() if number[p.module] == n
        }
        DirectWrites(plan, own).run({name: sources[name] for name in part})


def _assert_equal(again: Tensors, written: Tensors, how: object) -> None:
    for name, tensor in written.items():
        assert torch.equal(as_bytes(again[name].contiguous()), as_bytes(tensor.contiguous())), (
            name,
            how,
        )
