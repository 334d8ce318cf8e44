"""DTensors of FSDP2 and tensor parallelism as a source, on two ranks in two processes.

The ranks leave what their passes yielded in files. The oracle is an unsharded copy of the same
module, made here.

Run as a program, this file is one of the ranks.
"""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_wt.deadline import Deadline
from vllm_wt.errors import WeightTransferError
from vllm_wt.packing import meta_of
from vllm_wt.source import Announced, Cast, ModuleSource, StateDictSource, as_source, take_part
from vllm_wt.sources.announced import handed_over
from vllm_wt.sources.gathering import gathers_within
from vllm_wt.sources.whole import is_dtensor

DEADLINE_S = 120
WORLD = 2


class Model(nn.Module):
    """Sizes that two does not divide, a frozen and a plain parameter, a scalar-like one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 5, bias=False, dtype=torch.bfloat16)
        self.one = nn.Parameter(torch.tensor([3.0]))
        self.embed.weight.requires_grad_(False)
        self.register_buffer("bias_correction", torch.arange(5.0))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden).to(torch.bfloat16)) * self.one


def full_tensors():
    torch.manual_seed(11)
    return {
        "rows": torch.randn(5, 3),
        "columns": torch.randn(4, 7),
        "few": torch.randn(1, 3),
        "replicated": torch.randn(3, 2),
        "sum": torch.randn(3),
        "plain": torch.randn(2),
        "bytes": torch.arange(9, dtype=torch.uint8).view(3, 3),
        "empty": torch.empty(0, 3),
    }


class Rank:
    """What one rank does; ``report`` and the tensors of each pass go to the parent."""

    def __init__(self, rank, folder):
        from torch.distributed.device_mesh import init_device_mesh

        self.rank, self.folder = rank, folder
        self.report = {}
        self.mesh = init_device_mesh("cpu", (WORLD,))

    def walk(self, key, source):
        manifest = source.manifest()
        made = source.made
        items = list(source)
        again = list(source)
        save_file({n: t.clone() for n, t in items}, self.folder / f"{key}.{self.rank}")
        self.report[key] = {
            "order": [name for name, _ in items],
            "agrees": tuple(meta_of(*item) for item in items) == manifest.tensors,
            "shapes": {t.name: list(t.shape) for t in manifest.tensors},
            "plain": all(type(t) is torch.Tensor and not t.requires_grad for _, t in items),
            "made": sorted(made),
            "parts": [[name, is_dtensor(tensor)] for name, tensor in source.parts()],
            "distributed": [name for name, _ in source.distributed()],
            # Both passes' tensors are alive: only one that exists in full is twice the same.
            "in_place": sorted(
                n
                for (n, t), (_, u) in zip(items, again, strict=True)
                if t.numel() and t.data_ptr() == u.data_ptr()
            ),
        }
        return dict(items)

    def fsdp(self):
        from torch.distributed.fsdp import fully_shard

        model = Model()
        for layer in [*model.layers, model.head]:
            fully_shard(layer, mesh=self.mesh)
        ignored = model.one
        fully_shard(model, mesh=self.mesh, ignored_params={ignored})
        self.walk("fsdp", as_source(model))
        self.walk("fsdp_state", as_source(model.state_dict()))
        self.walk("fsdp_buffers", ModuleSource(model, buffers=True))
        self.report["sharded_rows"] = model.embed.weight.to_local().shape[0]
        with torch.no_grad():
            model(torch.arange(7))
        self.report["plain_after_forward"] = type(model.embed.weight) is nn.Parameter
        root = self.walk("fsdp_forward", as_source(model))
        model.reshard()
        self.report["freed"] = [n for n, t in root.items() if not t.untyped_storage().nbytes()]
        model(torch.arange(7)).float().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        self.walk("fsdp_step", as_source(model))

    def parallel(self):
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 3), nn.LayerNorm(3))
        parallelize_module(model, self.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.walk("parallel", as_source(model))

    def placements(self):
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

        full = full_tensors()
        state = {
            "rows": distribute_tensor(full["rows"], self.mesh, [Shard(0)]),
            "columns": distribute_tensor(full["columns"], self.mesh, [Shard(1)]),
            "few": distribute_tensor(full["few"], self.mesh, [Shard(0)]),
            "replicated": distribute_tensor(full["replicated"], self.mesh, [Replicate()]),
            "sum": DTensor.from_local(full["sum"] / WORLD, self.mesh, [Partial()]),
            "plain": full["plain"],
            "bytes": distribute_tensor(full["bytes"], self.mesh, [Shard(0)]),
            "empty": distribute_tensor(full["empty"], self.mesh, [Shard(0)]),
        }
        items = self.walk("placements", StateDictSource(state))
        self.report["replicated_itself"] = (
            items["replicated"].data_ptr() == state["replicated"].to_local().data_ptr()
        )
        self.walk("pairs", as_source(list(state.items())))
        self.walk("cast", Cast(StateDictSource(state), torch.bfloat16))

        class Doubled(StateDictSource):
            """Of a trainer that makes others of its tensors."""

            def __iter__(self):
                return ((name, 2 * tensor) for name, tensor in super().__iter__())

        doubled = Doubled({"rows": state["rows"]})
        self.report["doubled"] = [
            [name, torch.equal(tensor, 2 * full["rows"])] for name, tensor in doubled.parts()
        ]
        self.report["doubled_distributed"] = len(list(doubled.distributed()))
        self.report["announced"] = Announced(state).manifest() == StateDictSource(state).manifest()
        for name in ("rows", "replicated"):
            try:
                ((_, tensor),) = handed_over({name: state[name]})
                self.report[f"handed_{name}"] = torch.equal(tensor, full[name])
            except WeightTransferError as error:
                self.report[f"handed_{name}"] = error.facts()

        class Vllms:
            """A source of vLLM 0.29 that yields what the trainer has."""

            def metadata(self):
                return [meta_of(name, tensor) for name, tensor in state.items()]

            def __iter__(self):
                return iter(state.items())

        self.walk("vllm", as_source(Vllms()))
        # A second mesh dimension of size one changes nothing.
        from torch.distributed.device_mesh import init_device_mesh

        flat = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
        self.walk(
            "two_dimensions",
            as_source(
                {
                    "rows": distribute_tensor(full["rows"], flat, [Shard(0), Replicate()]),
                    "columns": distribute_tensor(full["columns"], flat, [Shard(0), Shard(1)]),
                }
            ),
        )

    def refused(self):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor

        alone = DeviceMesh("cpu", [0])
        tensor = distribute_tensor(full_tensors()["rows"], alone, [Shard(0)])
        self.attempt("alone", as_source({"rows": tensor}))
        if self.rank == 0:
            self.report["alone_itself"] = (
                next(iter(as_source({"rows": tensor})))[1].data_ptr()
                == tensor.to_local().data_ptr()
            )
        for original in (True, False):
            wrapped = FullyShardedDataParallel(
                nn.Linear(4, 4), use_orig_params=original, device_id=torch.device("cpu")
            )
            self.attempt(f"fsdp1_{original}", as_source(nn.Sequential(wrapped)))
        self.attempt("flat", as_source({"w": next(wrapped.parameters())}))
        meta = DTensor.from_local(torch.empty(2, device="meta"), self.mesh, [Shard(0)])
        self.attempt("meta", as_source({"w": meta}))
        self.attempt(
            "half",  # an error before any rank has entered a gather
            as_source({"w": distribute_tensor(torch.ones(4), self.mesh, [Shard(0)]), "x": None}),
        )

    def attempt(self, key, source):
        try:
            self.report[key] = {"made": sorted(source.made), "names": [n for n, _ in source]}
        except WeightTransferError as error:
            self.report[key] = error.facts()

    def lost(self):
        """The other rank dies where a gather needs it."""
        from torch.distributed.tensor import Shard, distribute_tensor

        tensor = distribute_tensor(torch.ones(4), self.mesh, [Shard(0)])
        torch.distributed.barrier()
        if self.rank == 1:
            os._exit(0)
        self.attempt("lost", as_source({"plain": torch.ones(1), "w": tensor}))

    def late(self):
        """The other rank comes to a gather when it has been given up."""
        from torch.distributed.tensor import Shard, distribute_tensor

        tensor = distribute_tensor(torch.arange(4.0), self.mesh, [Shard(0)])
        store = torch.distributed.distributed_c10d._get_default_store()
        source = as_source({"w": tensor})
        if self.rank == 0:
            deadline = Deadline(0.5)
            with gathers_within(deadline):
                self.attempt("late", source)
            self.report["expired"] = deadline.expired
            with gathers_within(Deadline(DEADLINE_S)):
                self.attempt("after", source)
            self.attempt("unbounded", source)
            store.set("given up", "")
        else:
            store.wait(["given up"])
            take_part(source, deadline_s=DEADLINE_S)
        torch.distributed.barrier()


def main(what, rank, folder):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / f"store-{what}"), WORLD)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    ranks = Rank(rank, folder)
    for step in what.split(","):
        getattr(ranks, step)()
    (folder / f"{what}.{rank}.json").write_text(json.dumps(ranks.report))
    if what == "lost":
        os._exit(
            0
        )  # gloo's threads, that wait for the dead rank, would end the process with a signal
    torch.distributed.destroy_process_group()


def run_ranks(what, folder):
    """What each rank reported; one that left nothing has died."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, what, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * WORLD, "\n".join(outputs)
    paths = [folder / f"{what}.{rank}.json" for rank in range(WORLD)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def reports(folder):
    return run_ranks("fsdp,parallel,placements,refused", folder)


def require_same(reports, folder, key, expected):
    """Both ranks' passes gave these values, in this order."""
    for rank, by_key in enumerate(reports):
        report = by_key[key]
        assert report["order"] == list(expected)
        assert report["agrees"]
        assert report["plain"]
        assert report["shapes"] == {name: list(t.shape) for name, t in expected.items()}
        got = load_file(folder / f"{key}.{rank}")
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], tensor), (rank, name)


def detached(module):
    return {name: param.detach() for name, param in module.named_parameters()}


def test_fsdp2(reports, folder):
    model = Model()
    for key, expected in {
        "fsdp": detached(model),
        "fsdp_state": model.state_dict(),
        "fsdp_buffers": detached(model) | {"bias_correction": model.bias_correction},
    }.items():
        require_same(reports, folder, key, expected)
    assert [report["sharded_rows"] for report in reports] == [4, 3]


def test_fsdp2_made(reports):
    """All but what no rank shares; one that FSDP2 ignores is below it, and not told apart."""
    names = sorted(detached(Model()))
    for report in reports:
        assert report["fsdp"]["made"] == names
        assert report["fsdp"]["in_place"] == ["one"]
        assert report["fsdp_state"]["made"] == [name for name in names if name != "one"]
        assert report["fsdp_state"]["in_place"] == ["bias_correction", "one"]


def test_what_is_passed_ungathered(reports):
    """And a source whose passes are its own is not passed by."""
    names = list(full_tensors())
    for report in reports:
        for key in ("placements", "pairs", "cast"):
            assert report[key]["parts"] == [[name, name != "plain"] for name in names]
            assert report[key]["distributed"] == [name for name in names if name != "plain"]
        assert report["vllm"]["parts"] == [[name, False] for name in names]
        assert report["vllm"]["distributed"] == []
        assert report["doubled"] == [["rows", True]]
        assert report["doubled_distributed"] == 0


def test_fsdp2_after_a_forward(reports, folder):
    """The root's parameters look plain then, and lose their memory later."""
    model = Model()
    require_same(reports, folder, "fsdp_forward", detached(model))
    for report in reports:
        assert report["plain_after_forward"]
        assert "embed.weight" in report["fsdp_forward"]["in_place"]
        assert "embed.weight" in report["freed"]
        assert {*report["freed"]} <= {*report["fsdp_forward"]["made"]}


def test_fsdp2_after_a_step(reports, folder):
    """The values of the pass, not those of connect; the gradients of equal ranks are their mean."""
    model = Model()
    model(torch.arange(7)).float().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    before = detached(Model())
    expected = detached(model)
    for rank, report in enumerate(reports):
        got = load_file(folder / f"fsdp_step.{rank}")
        assert report["fsdp_step"]["agrees"]
        assert {*got} == {*expected}
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, expected[name])
        assert not torch.equal(got["layers.0.weight"], before["layers.0.weight"])
        assert torch.equal(got["embed.weight"], before["embed.weight"])


def test_tensor_parallel(reports, folder):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 3), nn.LayerNorm(3))
    require_same(reports, folder, "parallel", detached(model))
    for report in reports:
        assert report["parallel"]["made"] == ["0.bias", "0.weight", "2.weight"]
        assert report["parallel"]["in_place"] == ["2.bias", "3.bias", "3.weight"]


@pytest.mark.parametrize("key", ["placements", "pairs", "vllm"])
def test_placements(reports, folder, key):
    full = full_tensors()
    require_same(reports, folder, key, full)
    gathered = sorted({*full} - {"replicated", "plain"})
    for report in reports:
        assert report[key]["made"] == (sorted(full) if key == "vllm" else gathered)
        assert report[key]["in_place"] == ["plain", "replicated"]
        assert report["replicated_itself"]


def test_announced_and_handed_over(reports):
    """A tensor that would have to be gathered is refused, with nobody in a gather."""
    for report in reports:
        assert report["announced"]
        assert report["handed_replicated"] is True
        assert report["handed_rows"]["what"] == "Tensor 'rows' is spread over several ranks"
        assert "full_tensor()" in report["handed_rows"]["cure"]


def test_two_mesh_dimensions(reports, folder):
    full = full_tensors()
    require_same(reports, folder, "two_dimensions", {n: full[n] for n in ("rows", "columns")})
    for report in reports:
        assert report["two_dimensions"]["made"] == ["columns"]
        assert report["two_dimensions"]["in_place"] == ["rows"]


def test_mesh_of_one_rank(reports):
    assert reports[0]["alone"] == {"made": [], "names": ["rows"]}
    assert reports[0]["alone_itself"]
    error = reports[1]["alone"]
    assert error["code"] == "E01"
    assert error["what"] == "'rows' is not on this rank"
    assert error["expected"] == "one of the ranks [0]"
    assert error["got"] == "rank 1"
    assert "device mesh" in error["cure"]


@pytest.mark.parametrize(
    ("key", "what", "got", "cure"),
    [
        ("fsdp1_True", "The module '0' is sharded by FSDP1", "FullyShardedData", "fully_shard"),
        ("fsdp1_False", "The module '0' is sharded by FSDP1", "FullyShardedData", "fully_shard"),
        ("flat", "'w' is many parameters in one", "FlatParameter", "fully_shard"),
        ("meta", "'w' was never materialised", "meta device", "load the"),
        ("half", "'x' is not a tensor", "NoneType", "leave it out"),
    ],
)
def test_refused_on_every_rank(reports, key, what, got, cure):
    for report in reports:
        assert report[key]["code"] == "E01"
        assert report[key]["what"] == what
        assert got in report[key]["got"]
        assert cure in report[key]["cure"]


def test_rank_that_died(tmp_path):
    survivor, died = run_ranks("lost", tmp_path)
    assert died is None
    assert survivor["lost"]["code"] == "E10"
    assert survivor["lost"]["what"].startswith("Tensor 'w' could not be gathered")
    assert survivor["lost"]["got"]
    assert "every rank" in survivor["lost"]["cure"]


def test_a_rank_that_does_not_come(folder):
    """A gather that was left is never taken for another one."""
    first, second = run_ranks("late", folder)
    assert first["expired"]
    late = first["late"]
    assert (late["code"], late["what"]) == ("E05", "Tensor 'w' was not gathered in time")
    assert late["expected"] == "all ranks of its mesh, within 0.5 s"
    assert "take_part" in late["cure"]
    for key in ("after", "unbounded"):
        after = first[key]
        assert after["code"] == "E10"
        assert "did not come to an earlier gather" in after["what"]
        assert "restart" in after["cure"]
    assert second == {}  # it has found what it waited for


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
