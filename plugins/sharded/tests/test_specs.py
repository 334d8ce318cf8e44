"""What the words for a trainer's layout mean: every tensor is there, as often as they say."""

import json
import os
import re
from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.layout import Layout
from vllm_wt_sharded.specs import layout_of_spec

from .support.instances import SEEDS, chunk

EXPERTS = 6


def model(random):
    """Layers with experts, in no order; some tensors of no layer, a scalar and an empty one."""
    names = ["embed.weight", "transformer.wte.weight", "norm.weight", "head.weight"]
    for layer in range(random.randint(4, 7)):
        names += [f"layers.{layer}.{each}.weight" for each in ("q_proj", "gate")]
        names += [f"layers.{layer}.mlp.experts.{n}.up.weight" for n in range(EXPERTS)]
    random.shuffle(names)
    metas = [
        TensorMeta(name, "bfloat16", tuple(random.choices(range(1, 10), k=random.randint(1, 3))))
        for name in names
    ]
    # In each stage, so that no rank is left without.
    metas.append(TensorMeta("layers.0.large", "float32", (512, 2)))
    metas.append(TensorMeta("large", "float32", (512,)))
    return [*metas, TensorMeta("layers.1.scale", "float32", ()), TensorMeta("none", "int8", (3, 0))]


def held(layout, rank):
    """First row and rows of each tensor that a rank has, by name; the other dimensions are whole."""
    found = {}
    for row in layout.rows_of(rank).tolist():
        meta, dims = layout.tensors[layout.tensor[row]], layout.start.shape[1]
        assert layout.start[row, 1:].tolist() == [0] * (dims - 1)
        assert tuple(layout.size[row, 1:].tolist()) == (*meta.shape[1:], *[1] * dims)[: dims - 1]
        assert meta.name not in found
        found[meta.name] = (int(layout.start[row, 0]), int(layout.size[row, 0]))
    return found


def times(layout):
    """How often each row of each tensor is held, by name."""
    counts = {
        meta.name: np.zeros(meta.shape[0] if meta.shape else 1, dtype=int)
        for meta in layout.tensors
        if meta.nbytes
    }
    for rank in range(layout.ranks):
        for name, (first, rows) in held(layout, rank).items():
            counts[name][first : first + rows] += 1
    return counts


WORDS = {
    "fsdp": st.integers(1, 6).map(lambda n: (f"fsdp:{n}", n, 1)),
    "hsdp": st.tuples(st.integers(1, 3), st.integers(1, 4)).map(
        lambda n: (f"hsdp:{n[0]}x{n[1]}", n[0] * n[1], n[0])
    ),
    "pp": st.integers(1, 2).map(lambda n: (f"pp:{n}", n, 1)),
    "ep": st.integers(1, 3).map(lambda n: (f"ep:{n}", n, 1)),
}
"""By kind: a word, its ranks, and how often they have everything."""


@st.composite
def specs(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(WORDS)), min_size=1, max_size=3, unique=True))
    return [draw(WORDS[kind]) for kind in kinds]


@given(SEEDS, specs())
@settings(max_examples=150, deadline=None)
def test_every_row_is_held_as_often_as_there_are_replicas(seed, words):
    metas = model(Random(seed))
    layout = layout_of_spec("+".join(word for word, _, _ in words), metas)
    assert layout.tensors == tuple(metas)
    assert layout.ranks == np.prod([ranks for _, ranks, _ in words])
    replicas = np.prod([copies for _, _, copies in words])
    counts = times(layout)
    scalar = counts.pop("layers.1.scale")
    for name, count in counts.items():
        assert set(count.tolist()) == {replicas}, name
    stages = next((ranks for word, ranks, _ in words if word.startswith("pp")), 1)
    assert scalar.tolist() == [layout.ranks // stages]
    assert not np.isin(layout.tensor, [len(metas) - 1]).any()


@given(SEEDS, st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_rows_are_cut_as_torch_cuts_them(seed, count):
    metas = model(Random(seed))
    layout = layout_of_spec(f"fsdp:{count}", metas)
    for rank in range(count):
        found = held(layout, rank)
        for meta in metas[:-2]:
            begin, rows = chunk(meta.shape[0], count, rank)
            assert found.get(meta.name) == ((begin, rows) if rows else None)


def test_replicas_are_groups_of_neighbours():
    layout = layout_of_spec("hsdp:3x2", model(Random(0)))
    shards = [held(layout, rank) for rank in range(6)]
    assert shards[0] == shards[2] == shards[4] != shards[1] == shards[3] == shards[5]


def test_stages_have_neighbouring_layers():
    metas = [TensorMeta(f"layers.{n}.weight", "int8", (4,)) for n in (10, 2, 0, 9, 1)]
    metas += [
        TensorMeta(name, "int8", (4,)) for name in ("lm_head.weight", "model.embed_tokens.weight")
    ]
    layout = layout_of_spec("pp:2", metas)
    first, last = (set(held(layout, rank)) for rank in (0, 1))
    assert first == {"model.embed_tokens.weight", *(f"layers.{n}.weight" for n in (0, 1, 2))}
    assert last == {"lm_head.weight", "layers.9.weight", "layers.10.weight"}


def test_experts_are_whole_in_their_group_and_all_else_is_cut():
    metas = [TensorMeta(f"layers.0.mlp.experts.{n}.up.weight", "int8", (4, 2)) for n in range(5)]
    metas += [TensorMeta("layers.0.mlp.shared_experts.up.weight", "int8", (4, 2))]
    layout = layout_of_spec("ep:2", metas)
    assert held(layout, 0) == {
        **{f"layers.0.mlp.experts.{n}.up.weight": (0, 4) for n in (0, 1, 2)},
        "layers.0.mlp.shared_experts.up.weight": (0, 2),
    }
    assert held(layout, 1) == {
        **{f"layers.0.mlp.experts.{n}.up.weight": (0, 4) for n in (3, 4)},
        "layers.0.mlp.shared_experts.up.weight": (2, 2),
    }


def test_experts_in_one_tensor():
    layout = layout_of_spec("ep:2", [TensorMeta("layers.0.mlp.experts.up", "int8", (4, 3, 2))])
    assert held(layout, 1) == {"layers.0.mlp.experts.up": (2, 2)}


def test_ranks_count_as_in_a_mesh():
    layout = layout_of_spec("pp:2+fsdp:4", model(Random(1)))
    assert all("embed.weight" not in held(layout, rank) for rank in range(4, 8))
    assert [held(layout, rank)["layers.0.large"] for rank in range(4)] == [
        (0, 128),
        (128, 128),
        (256, 128),
        (384, 128),
    ]


@pytest.mark.parametrize(
    ("spec", "what", "got"),
    [
        ("", "no way for a trainer", "''"),
        ("fsdp", "no way for a trainer", "'fsdp'"),
        ("fsdp:0", "no way for a trainer", "'fsdp:0'"),
        ("fsdp:-2", "no way for a trainer", "'fsdp:-2'"),
        ("fsdp:2x2", "no way for a trainer", "'fsdp:2x2'"),
        ("hsdp:2", "no way for a trainer", "'hsdp:2'"),
        ("tp:4", "no way for a trainer", "'tp:4'"),
        ("fsdp:2+", "no way for a trainer", "''"),
        ("pp:2,fsdp:4", "no way for a trainer", "'pp:2,fsdp:4'"),
        ("fsdp:2+fsdp:2", "no way for a trainer", "'fsdp' twice"),
        ("fsdp:4097", "too many ranks", "4097"),
        ("hsdp:99999x99999", "too many ranks", str(99999**2)),
        ("pp:5", "cannot be divided into 5 stages", "4 layers, by the names"),
        ("ep:7", "cannot be divided into 7 groups", "6 experts, by the names"),
        ("fsdp:65", "would hold nothing", "none on rank 64 of 65"),
    ],
)
def test_what_is_refused(spec, what, got):
    metas = [
        TensorMeta(f"layers.{n}.mlp.experts.{e}", "int8", (64,)) for n in range(4) for e in range(6)
    ]
    metas = [TensorMeta(f"{meta.name}.weight", "int8", meta.shape) for meta in metas]
    with pytest.raises(InvalidInfo, match=what) as caught:
        layout_of_spec(spec, metas)
    assert got in caught.value.got
    assert (caught.value.where, caught.value.backend) == ("source", "sharded")
    assert caught.value.expected
    assert caught.value.cure


def test_what_is_allowed_is_named():
    with pytest.raises(InvalidInfo, match=r"Expected: fsdp:N, hsdp:RxN, pp:N or ep:N, .*\*\.json"):
        layout_of_spec("ddp", [TensorMeta("a", "int8", (1,))])


@pytest.mark.parametrize("kind", ["pp", "ep"])
def test_a_model_without_layers_or_experts(kind):
    with pytest.raises(InvalidInfo, match=r"Got: 0 .*Cure: leave this word out"):
        layout_of_spec(f"{kind}:1", [TensorMeta("weight", "int8", (4,))])


def test_files_of_a_trainer(tmp_path):
    own = [TensorMeta("theirs", "float32", (4, 2))]
    for rank in range(2):
        layout = Layout.of(own, [("theirs", rank, (2 * rank, 0), (2, 2))])
        (tmp_path / f"layout-{rank}.json").write_text(json.dumps(layout.to_wire()))
    found = layout_of_spec(f"{tmp_path}/layout-*.json", [TensorMeta("checkpoint's", "int8", (1,))])
    assert found.tensors == tuple(own)
    assert [held(found, rank) for rank in range(2)] == [{"theirs": (0, 2)}, {"theirs": (2, 2)}]
    one = tmp_path / "whole.json"
    one.write_text(json.dumps(found.to_wire()))
    assert layout_of_spec(os.fspath(one), own).digest == found.digest


def test_files_that_are_none(tmp_path):
    wire = Layout.of([TensorMeta("a", "int8", (4,))], [("a", 1, (0,), (4,))]).to_wire()
    other = Layout.of([TensorMeta("b", "int8", (4,))], [("b", 0, (0,), (4,))]).to_wire()
    for name, text in {
        "broken": "{",
        "list": "[]",
        "field": json.dumps(wire | {"colour": "red"}),
        "idle": json.dumps(wire),
        "of-two-1": json.dumps(wire),
        "of-two-2": json.dumps(other),
    }.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "folder.json").mkdir()
    for name, error, what in (
        ("nothing", InvalidInfo, "There is no file of a layout"),
        ("broken", InvalidInfo, "'broken.json' of a layout cannot be read"),
        ("folder", InvalidInfo, "'folder.json' of a layout cannot be read"),
        ("list", InvalidInfo, "A layout has a wrong value"),
        ("field", InvalidInfo, "'colour'"),
        ("idle", InvalidInfo, "none on rank 0 of 2"),
        ("of-two-*", ManifestMismatch, "of different tensors"),
    ):
        with pytest.raises(error, match=what) as caught:
            layout_of_spec(f"{tmp_path}/{name}.json", [])
        assert caught.value.cure


def test_help_has_every_word(capsys):
    from vllm_wt.cli import main

    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = Counter(re.findall(r"\b(fsdp|hsdp|pp|ep):", capsys.readouterr().out))
    assert set(said) == set(WORDS)
