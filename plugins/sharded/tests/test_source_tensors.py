"""Modules and DTensors as sharded sources, on two, three and four ranks in processes of their own.

The oracle is torch's own ``full_tensor``, or the model before it was sharded: it is what all ranks'
pieces are when numpy puts them together. Values are distinct within a tensor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import TensorMeta
from vllm_wt.source import Cast, as_source
from vllm_wt_sharded.sources import TensorShards

SCRIPT = Path(__file__).with_name("support") / "source_ranks.py"
WORLDS = (2, 3, 4)
LIMIT_S = 240
BOTH = pytest.mark.parametrize("world", [2, 3])
FOUR = pytest.mark.parametrize("key", ["composed", "hybrid", "two_dimensions"])


class Ranks:
    """What the ranks of one world have left."""

    def __init__(self, folder, world):
        self.reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
        self._values = [load_file(folder / f"{rank}.safetensors") for rank in range(world)]

    def each(self, key):
        return [report[key] for report in self.reports]

    def full(self, key):
        """What each rank says that the full tensors are."""
        prefix = f"{key}/full/"
        return [
            {n.removeprefix(prefix): t for n, t in values.items() if n.startswith(prefix)}
            for values in self._values
        ]

    def pieces(self, key):
        """(rank, name, start, values) of all pieces."""
        for rank, report in enumerate(self.reports):
            for index, (name, start) in enumerate(report[key]["pieces"]):
                yield rank, name, start, self._values[rank][f"{key}/piece/{index}"]

    def assert_whole(self, key):
        """The pieces of all ranks make the full tensors of each, and the layouts say the same."""
        for full in self.full(key):
            made = {n: np.zeros(tuple(t.shape)) for n, t in full.items()}
            seen = {n: np.zeros(tuple(t.shape), dtype=int) for n, t in full.items()}
            for _, name, start, values in self.pieces(key):
                assert values.dtype == full[name].dtype
                box = tuple(slice(s, s + n) for s, n in zip(start, values.shape, strict=True))
                seen[name][box] += 1
                made[name][box] += values.double().numpy()
            for name, tensor in full.items():
                assert (seen[name] > 0).all(), name
                assert np.array_equal(made[name] / seen[name], tensor.double().numpy()), name
        rows = [
            [name, rank, start, list(values.shape)]
            for rank, name, start, values in self.pieces(key)
        ]
        assert rows == [row for report in self.each(key) for row in report["rows"]]
        assert all(report["detached"] for report in self.each(key))

    def sizes(self, key, name):
        """The shapes of each rank's pieces of one tensor."""
        found = [[] for _ in self.reports]
        for rank, each, _, values in self.pieces(key):
            if each == name:
                found[rank].append(list(values.shape))
        return found


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), *map(str, WORLDS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
    finally:
        if process.poll() is None:  # its forks are of its group
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return {world: Ranks(folder / str(world), world) for world in WORLDS}


@BOTH
@pytest.mark.parametrize("key", ["fsdp", "fsdp_buffers", "fsdp_renamed", "fsdp_mapped"])
def test_fsdp2_in_place(worlds, world, key):
    ranks = worlds[world]
    ranks.assert_whole(key)
    for report in ranks.each(key):
        assert report["made"] == []
        assert report["in_place"] == sorted({name for name, _ in report["pieces"]})
        assert report["same"]


@BOTH
def test_fsdp2_shares_every_byte_but_what_is_replicated(worlds, world):
    sizes = worlds[world].sizes("fsdp", "embed.weight")
    rows = [shape[0][0] if shape else 0 for shape in sizes]
    assert rows == [len(chunk) for chunk in torch.arange(7).chunk(world)]
    assert worlds[world].sizes("fsdp", "scale") == [[[]]] * world


@BOTH
def test_fsdp2_after_a_forward_is_in_shards_again(worlds, world):
    """It leaves the root's parameters gathered, and takes their memory away later."""
    for report in worlds[world].reports:
        assert report["gathered"]
        assert report["same_after_forward"]
        assert report["stayed"]


@BOTH
def test_fsdp2_after_a_step_has_new_values_in_the_same_memory(worlds, world):
    worlds[world].assert_whole("fsdp_step")
    assert all(worlds[world].each("changed"))
    assert all(worlds[world].each("same_after_step"))


@BOTH
def test_cast_by_each_rank(worlds, world):
    ranks = worlds[world]
    ranks.assert_whole("fsdp_cast")
    names = set(ranks.full("fsdp_cast")[0])
    for report in ranks.each("fsdp_cast"):
        assert set(report["made"]) == names - {"head.weight"}
        assert set(report["in_place"]) & names <= {"head.weight"}
        assert not report["same"]


@BOTH
def test_every_placement(worlds, world):
    ranks = worlds[world]
    ranks.assert_whole("placements")
    for report in ranks.each("placements"):
        assert report["made"] == ["sum"]
        assert "sum" not in report["in_place"]
        assert {"rows", "replicated", "plain", "scalar"} <= {*report["in_place"]}
    chunks = torch.arange(257).chunk(world)
    assert ranks.sizes("placements", "rows") == [[[len(chunk), 3]] for chunk in chunks]
    assert ranks.sizes("placements", "few") == [[[1, 3]]] + [[]] * (world - 1)
    assert ranks.sizes("placements", "empty") == [[]] * world
    assert ranks.sizes("placements", "sum") == [[[5]]] * world
    assert ranks.sizes("placements", "replicated") == [[[3, 2]]] * world


def test_tensor_parallel(worlds):
    worlds[2].assert_whole("tensor_parallel")
    assert worlds[2].sizes("tensor_parallel", "0.weight") == [[[4, 3]], [[3, 3]]]
    assert worlds[2].sizes("tensor_parallel", "2.weight") == [[[3, 4]], [[3, 3]]]


def test_a_rank_that_is_not_in_the_mesh_holds_nothing(worlds):
    rows = torch.arange(12.0).reshape(6, 2).tolist()
    replica = [[0], [0, 1]]
    parts = [[[[0, 0], rows[:3]], replica], [[[3, 0], rows[3:]], replica], []]
    assert worlds[3].each("part") == parts


@FOUR
def test_two_dimensional_meshes(worlds, key):
    worlds[4].assert_whole(key)


def test_fsdp2_over_tensor_parallelism(worlds):
    ranks = worlds[4]
    for names in ranks.each("composed_strided"):
        assert names == ["0.weight", "0.bias"]
    # 10 rows: 5 a rank of tp, of which 3 and 2 a rank of dp; ranks are dp-major.
    assert ranks.sizes("composed", "0.weight") == [[[3, 6]], [[3, 6]], [[2, 6]], [[2, 6]]]
    starts = [start for _, name, start, _ in ranks.pieces("composed") if name == "0.weight"]
    assert starts == [[0, 0], [5, 0], [3, 0], [8, 0]]
    assert all(report["made"] == [] for report in ranks.each("composed"))


def test_hybrid_replicas_are_declared_by_each_rank(worlds):
    starts = [start for _, name, start, _ in worlds[4].pieces("hybrid") if name == "embed.weight"]
    assert starts == [[0, 0], [4, 0], [0, 0], [4, 0]]


def test_several_boxes_of_one_local_tensor(worlds):
    ranks = worlds[4]
    boxes = [[[2, 2]] * 3] * 4
    assert ranks.sizes("two_dimensions", "several") == boxes
    assert ranks.sizes("two_dimensions", "several_columns") == [[[3, 3]] * 2] * 4
    for report in ranks.each("two_dimensions"):
        assert report["made"] == ["sum", "sum_of_rows"]
        assert {"several", "several_columns", "strided"} <= {*report["in_place"]}


def test_a_local_tensor_that_its_placement_does_not_mean(worlds):
    for rank, error in enumerate(worlds[2].each("odd")):
        assert error["code"] == ManifestMismatch.code
        assert "'w'" in error["what"]
        assert str([2 - rank, 2]) in error["expected"]
        assert error["got"] == str([1 + rank, 2])
        assert error["cure"]


def test_a_dtensor_where_a_local_one_is_meant(worlds):
    for error in worlds[2].each("dtensor"):
        assert error["code"] == InvalidInfo.code
        assert "'w'" in error["what"]
        assert error["cure"]


def test_a_plain_part_of_a_tensor(worlds):
    for rank, error in enumerate(worlds[2].each("part_of_other")):
        assert error["code"] == ManifestMismatch.code
        assert error["where"] == f"tensors of rank {rank}"
        assert "[7, 2]" in error["expected"]
        assert "[9, 2]" in error["got"]
        assert "ParallelTable" in error["cure"]


@BOTH
def test_exchange(worlds, world):
    digests, ranks, starts = zip(*worlds[world].each("layout"), strict=True)
    assert len(set(digests)) == 1
    assert ranks == (list(range(world)),) * world
    assert starts == ([[5 * rank, 0] for rank in range(world)],) * world


@BOTH
def test_exchange_fails_on_all_ranks(worlds, world):
    ranks = worlds[world]
    for error in ranks.each("hole"):
        assert error["code"] == ManifestMismatch.code
        assert error["where"] == "w[5:10, 0:2]"
    for error in ranks.each("failed"):
        assert error["code"] == ManifestMismatch.code
        assert "does not lie in tensor 'w'" in error["what"]
    for error in ranks.each("differing"):
        assert error["code"] == ManifestMismatch.code
        assert "'x'" in error["expected"] + error["got"]
    for error in ranks.each("misplaced"):
        assert error["code"] == InvalidInfo.code
        assert error["got"] == f"rank 0 of {world}"


def test_waits_end(worlds):
    assert worlds[2].reports[0]["alone"]["code"] == "E05"
    assert worlds[2].reports[0]["late"]["code"] == "E05"


def test_one_process_without_torch_distributed():
    weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    source = TensorShards({"a": weight, "b": weight})  # tied: two names, one memory
    one, other = source.pieces()
    assert (source.rank, source.ranks) == (0, 1)
    assert source.tensors == tuple(TensorMeta(name, "float32", (2, 3)) for name in "ab")
    assert one.tensor.data_ptr() == other.tensor.data_ptr() == weight.data_ptr()
    assert (one.name, other.name, one.start) == ("a", "b", (0, 0))
    assert source.device == weight.device


def test_a_tied_module_has_its_storage_once():
    module = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    module[1].weight = module[0].weight
    assert [piece.name for piece in TensorShards(module).pieces()] == ["0.weight"]


@pytest.mark.parametrize("kind", ["state", "module"])
def test_memory_that_moved_is_noticed(kind):
    module = torch.nn.Linear(3, 2)
    state = dict(module.named_parameters())
    source = TensorShards(module if kind == "module" else state)
    assert not source.is_same()  # nobody has looked
    source.pieces()
    assert source.is_same()
    with torch.no_grad():
        module.weight.add_(1)
    assert source.is_same()
    module.weight.data = module.weight.data.clone()
    assert not source.is_same()
    assert source.pieces()[0].tensor.data_ptr() == module.weight.data_ptr()
    assert source.is_same()
    if kind == "module":
        module.bias = torch.nn.Parameter(module.bias.detach().clone())
    else:
        state["bias"] = state["bias"].detach().clone()
    assert not source.is_same()


def test_a_list_of_pairs_is_looked_at_anew():
    source = TensorShards([("a", torch.ones(2))])
    source.pieces()
    assert not source.is_same()


def test_refused():
    weight = torch.ones(4, 3)
    with pytest.raises(ManifestMismatch) as caught:
        TensorShards({"a": weight, "b": weight}, rename={"b": "a"})
    assert "'a'" in caught.value.what
    tensors = [TensorMeta("a", "bfloat16", (4, 3))]
    with pytest.raises(ManifestMismatch) as caught:
        TensorShards({"a": weight}, tensors=tensors, rank=2, ranks=3).pieces()
    assert caught.value.where == "tensors of rank 2"
    assert (caught.value.expected, caught.value.got) == ("bfloat16", "float32")
    with pytest.raises(ManifestMismatch) as caught:
        TensorShards({"c": weight}, tensors=tensors).pieces()
    assert "'c'" in caught.value.what
    tensors = [TensorMeta("a", "float32", (4, 3))]
    with pytest.raises(ManifestMismatch) as caught:
        TensorShards({"a": weight, "b": weight}, tensors=tensors, rename={"b": "a"}).pieces()
    assert "twice" in caught.value.what
    freed = TensorShards({"a": weight})
    weight.untyped_storage().resize_(0)
    with pytest.raises(ManifestMismatch) as caught:
        freed.pieces()
    assert "'a'" in caught.value.what
    for place in ({"rank": 1}, {"rank": 2, "ranks": 2}, {"rank": -1, "ranks": 2}):
        with pytest.raises(InvalidInfo) as caught:
            TensorShards({"a": torch.ones(1)}, **place)
        assert caught.value.cure


def test_what_connect_makes_of_a_module_or_a_mapping_is_seen_through():
    """Its memory is looked at as if that had been given itself; what is cast is made anew."""
    module = torch.nn.Linear(3, 2)
    state = dict(module.named_parameters())
    for weights in (as_source(module), as_source(state), Cast(as_source(module), torch.float32)):
        shards = TensorShards(weights)
        shards.pieces()
        assert shards.is_same()
        module.weight.data = module.weight.data.clone()
        assert not shards.is_same()
    cast = TensorShards(Cast(as_source(module), torch.bfloat16))
    assert cast.made == {"weight", "bias"}
    assert {piece.tensor.dtype for piece in cast.pieces()} == {torch.bfloat16}
    assert not cast.is_same()
