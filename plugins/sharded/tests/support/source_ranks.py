"""Ranks of a trainer over gloo: ``python source_ranks.py FOLDER WORLD...``; all share one import.

The ranks of each world run their steps and leave in ``FOLDER/WORLD`` what they found: the values in
``RANK.safetensors``, the rest in ``RANK.json``. Values are distinct within a tensor, so that one in a
wrong place shows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt.manifest import TensorMeta
from vllm_wt.sources.gathering import gathers_within
from vllm_wt_sharded.sources import DeclaredShards, TensorShards, exchange

WAIT_S = 60.0


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Distinct values, exact in any dtype for up to 256 of them."""
    count = torch.Size(shape).numel()
    return torch.arange(count).reshape(shape).to(dtype)


class Model(nn.Module):
    """Sizes that two does not divide, one row, a frozen parameter, a plain one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5, bias=False, dtype=torch.bfloat16)
        self.one = nn.Parameter(torch.tensor([3.0]))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("correction", torch.arange(5.0))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(1 + numbered(*parameter.shape))
        self.embed.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden).to(torch.bfloat16)) * self.one * self.scale


class Rank:
    """What one rank does."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self.mesh = init_device_mesh("cpu", (world,))
        self.report: dict[str, Any] = {}
        self.values: dict[str, torch.Tensor] = {}

    def leave(self) -> None:
        save_file(self.values, self.folder / f"{self.rank}.safetensors")
        (self.folder / f"{self.rank}.json").write_text(json.dumps(self.report))

    def look(self, key: str, source: TensorShards, full: dict[str, torch.Tensor]) -> None:
        """Leave what this rank's pieces are, and what torch says that the full tensors are."""
        pieces, again, layout = source.pieces(), source.pieces(), source.layout()
        for index, piece in enumerate(pieces):
            self.values[f"{key}/piece/{index}"] = piece.tensor.contiguous().clone()
        for name, tensor in full.items():
            self.values[f"{key}/full/{name}"] = tensor.detach().contiguous().clone()
        self.report[key] = {
            "pieces": [[piece.name, list(piece.start)] for piece in pieces],
            "rows": [
                [layout.tensors[tensor].name, int(layout.rank[row])]
                + [column[row, : len(layout.tensors[tensor].shape)].tolist() for column in columns]
                for columns in [(layout.start, layout.size)]
                for row, tensor in enumerate(layout.tensor)
            ],
            "made": sorted(source.made),
            "in_place": sorted(
                {
                    one.name
                    for one, other in zip(pieces, again, strict=True)
                    if one.tensor.data_ptr() == other.tensor.data_ptr()
                }
            ),
            "detached": not any(piece.tensor.requires_grad for piece in pieces),
            "same": source.is_same(),
        }

    def state(self, key: str, state: dict[str, torch.Tensor]) -> None:
        full = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in state.items()
        }
        self.look(key, TensorShards(state), full)

    def attempt(self, key: str, call: Any) -> None:
        try:
            call()
            self.report[key] = None
        except WeightTransferError as error:
            self.report[key] = error.facts()

    def fsdp(self) -> None:
        model, plain = Model(), dict(Model().named_parameters())
        for layer in [*model.layers, model.head]:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh, ignored_params={model.one, model.scale})
        source = TensorShards(model)
        self.look("fsdp", source, plain)
        self.look("fsdp_buffers", TensorShards(model, buffers=True), Model().state_dict())
        renamed = TensorShards(model, rename=lambda n: None if n == "one" else f"model.{n}")
        self.look(
            "fsdp_renamed", renamed, {f"model.{n}": t for n, t in plain.items() if n != "one"}
        )
        mapped = TensorShards(model, rename={"one": None, "scale": "factor"})
        expected = {"factor" if n == "scale" else n: t for n, t in plain.items() if n != "one"}
        self.look("fsdp_mapped", mapped, expected)
        cast = TensorShards(model, dtype=torch.bfloat16)
        self.look("fsdp_cast", cast, {n: t.to(torch.bfloat16) for n, t in plain.items()})
        addresses = [piece.tensor.data_ptr() for piece in source.pieces()]
        with torch.no_grad():
            model(torch.arange(7))
        self.report["gathered"] = type(model.embed.weight) is nn.Parameter
        self.report["same_after_forward"] = source.is_same()
        with torch.no_grad():
            model(torch.arange(7))
        self.report["stayed"] = addresses == [piece.tensor.data_ptr() for piece in source.pieces()]
        model(torch.arange(7)).float().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        self.report["same_after_step"] = source.is_same()
        stepped = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.named_parameters()
        }
        changed = not torch.equal(stepped["head.weight"], plain["head.weight"])
        self.report["changed"] = changed
        self.look("fsdp_step", source, stepped)

    def placements(self) -> None:
        rows = [Shard(0)]
        ranks = self.world
        sum_of = numbered(5) / ranks
        self.state(
            "placements",
            {
                "rows": distribute_tensor(numbered(257, 3), self.mesh, rows),
                "columns": distribute_tensor(numbered(2, 7), self.mesh, [Shard(1)]),
                "middle": distribute_tensor(numbered(2, 5, 3), self.mesh, [Shard(-2)]),
                "few": distribute_tensor(numbered(1, 3), self.mesh, rows),
                "replicated": distribute_tensor(numbered(3, 2), self.mesh, [Replicate()]),
                "scalar": distribute_tensor(torch.tensor(4.0), self.mesh, [Replicate()]),
                "sum": DTensor.from_local(sum_of, self.mesh, [Partial()]),
                "plain": numbered(4),
                "bytes": distribute_tensor(numbered(9, dtype=torch.uint8), self.mesh, rows),
                "empty": distribute_tensor(numbered(0, 3), self.mesh, rows),
            },
        )

    def tensor_parallel(self) -> None:
        model = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 3), nn.LayerNorm(3))
        self.fill(model)
        full = {name: value.detach().clone() for name, value in model.named_parameters()}
        parallelize_module(model, self.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.look("tensor_parallel", TensorShards(model), full)

    def part_of_the_ranks(self) -> None:
        """A DTensor on a mesh that the last rank is not in, as of another pipeline stage."""
        mesh = DeviceMesh("cpu", list(range(self.world - 1)))
        sharded = distribute_tensor(numbered(6, 2), mesh, [Shard(0)])
        replicated = distribute_tensor(numbered(2), mesh, [Replicate()])
        source = TensorShards({"w": sharded, "x": replicated})
        self.report["part"] = [[list(p.start), p.tensor.tolist()] for p in source.pieces()]

    def composed(self) -> None:
        """FSDP2 over tensor parallelism: dp 2 x tp 2, in sizes that do not divide evenly."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6))
        self.fill(model)
        full = {name: value.detach().clone() for name, value in model.named_parameters()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in model:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        self.report["composed_strided"] = [
            name
            for name, value in model.named_parameters()
            if any(type(placement) is _StridedShard for placement in value.placements)
        ]
        self.look("composed", TensorShards(model), full)

    def hybrid(self) -> None:
        """FSDP2 that shards over two ranks and replicates over two."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, plain = Model(), dict(Model().named_parameters())
        fully_shard(model, mesh=mesh, ignored_params={model.scale})
        self.look("hybrid", TensorShards(model), plain)

    def two_dimensions(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2))

        def on(full: torch.Tensor, *placements: Any) -> DTensor:
            return distribute_tensor(full, mesh, placements)

        two = numbered(13, 3)
        several = {
            "rows": on(two, Shard(0), Shard(0)),
            "both": on(numbered(5, 7), Shard(0), Shard(1)),
            "inner": on(two, Replicate(), Shard(0)),
            "strided": on(numbered(12, 2), _StridedShard(0, split_factor=2), Shard(0)),
            "several": on(numbered(12, 2), _StridedShard(0, split_factor=3), Replicate()),
            "several_columns": on(numbered(3, 12), _StridedShard(1, split_factor=2), Replicate()),
            "sum": DTensor.from_local(numbered(3, 4) / 2, mesh, [Replicate(), Partial()]),
            "sum_of_rows": DTensor.from_local(
                (numbered(6, 2) / 2)[self.rank // 2 * 3 :][:3], mesh, [Shard(0), Partial()]
            ),
        }
        self.state("two_dimensions", several)

    def refused(self) -> None:
        """A local tensor that is not what its placement says, and a division that is not torch's."""
        odd = DTensor.from_local(
            numbered(1 + self.rank, 2), self.mesh, [Shard(0)], shape=(3, 2), stride=(2, 1)
        )
        self.attempt("odd", TensorShards({"w": odd}).pieces)
        rows = distribute_tensor(numbered(4, 2), self.mesh, [Shard(0)])
        self.attempt("dtensor", lambda: DeclaredShards({"w": ((0, 0), (4, 2), rows)}))
        other = [TensorMeta("w", "float32", (7, 2))]
        self.attempt("part_of_other", TensorShards({"w": numbered(9, 2)}, tensors=other).pieces)

    def exchanged(self) -> None:
        group = dist.group.WORLD
        first = self.rank * 5
        own = {"w": ((first, 0), (5 * self.world, 2), numbered(5, 2))}
        layout = exchange(DeclaredShards(own), group, deadline_s=WAIT_S)
        self.report["layout"] = [layout.digest, layout.rank.tolist(), layout.start.tolist()]
        hole = DeclaredShards({} if self.rank == 1 else own, tensors=layout.tensors)
        self.attempt("hole", lambda: exchange(hole, group, deadline_s=WAIT_S))
        tensors = [TensorMeta("w", "float32", (5 * self.world, 2))]
        beyond = (
            own if self.rank else {"w": ((1, 0), tensors[0].shape, numbered(*tensors[0].shape))}
        )
        failing = DeclaredShards(beyond, tensors=tensors)
        self.attempt("failed", lambda: exchange(failing, group, deadline_s=WAIT_S))
        more = [*tensors, TensorMeta("x", "float32", (self.rank,))]
        differing = DeclaredShards(own, tensors=more)
        self.attempt("differing", lambda: exchange(differing, group, deadline_s=WAIT_S))
        misplaced = DeclaredShards(own, rank=0, ranks=self.world)
        self.attempt("misplaced", lambda: exchange(misplaced, group, deadline_s=WAIT_S))

    def alone(self) -> None:
        """The other ranks do not come."""
        if self.rank == 0:
            source = DeclaredShards({"w": ((0,), (3,), numbered(3))})
            self.attempt("alone", lambda: exchange(source, dist.group.WORLD, deadline_s=0.2))
            partial = DTensor.from_local(numbered(3), self.mesh, [Partial()])
            late = TensorShards({"w": partial})
            with gathers_within(Deadline(0.2)):
                self.attempt("late", late.pieces)
        # What the first rank has left in the group would meet any collective: none comes after.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"done/{self.rank}", "")
        store.wait([f"done/{rank}" for rank in range(self.world)], timedelta(seconds=WAIT_S))

    @staticmethod
    def fill(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(numbered(*parameter.shape))


STEPS = {
    2: ["fsdp", "placements", "tensor_parallel", "refused", "exchanged", "alone"],
    3: ["fsdp", "placements", "part_of_the_ranks", "exchanged"],
    4: ["composed", "hybrid", "two_dimensions"],
}


def run(rank: int, world: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=WAIT_S)
    )
    ranks = Rank(rank, world, folder)
    for step in STEPS[world]:
        getattr(ranks, step)()
    ranks.leave()


def fork(rank: int, world: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        run(rank, world, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # gloo would wait for what a rank has left


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    alive = set()
    for world in map(int, sys.argv[2:]):
        (folder / str(world)).mkdir()
        alive.update(fork(rank, world, folder / str(world)) for rank in range(world))
    while alive:
        pid, status = os.wait()
        alive.remove(pid)
        if status:
            for other in alive:  # or they would wait for it
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    main()
