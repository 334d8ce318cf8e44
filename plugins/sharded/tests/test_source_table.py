"""Tensors that a trainer divides by hand, as Megatron does: each rank's are sliced here, written out.

Two pipeline stages of two layers, of which the second has experts; tensor parallel 2, and experts over
the same two ranks. The oracle is the full state that was sliced.
"""

import numpy as np
import pytest
import torch

from vllm_wt.errors import InvalidInfo, ManifestMismatch
from vllm_wt.packing import meta_of
from vllm_wt_sharded.sources import ParallelTable, Rule, Split, TableShards, joined

HIDDEN, HEAD, QUERY_HEADS, GROUPS, FFN, VOCAB, EXPERTS = 6, 2, 8, 4, 10, 11, 4
Q, KV = QUERY_HEADS * HEAD, GROUPS * HEAD
LAYER = r"decoder\.layers\.(?P<layer>\d+)\."
ATTENTION = "model.layers.{layer}.self_attn."
MLP = "model.layers.{layer}.mlp."
EXPERT = MLP + "experts.{expert}."


def full_state():
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (Q, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV, HIDDEN),
            f"{prefix}self_attn.q_proj.bias": (Q,),
            f"{prefix}self_attn.k_proj.bias": (KV,),
            f"{prefix}self_attn.v_proj.bias": (KV,),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, Q),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
        }
        blocks = [f"{prefix}mlp."]
        if layer >= 2:
            shapes[f"{prefix}mlp.gate.weight"] = (EXPERTS, HIDDEN)
            blocks = [f"{prefix}mlp.experts.{expert}." for expert in range(EXPERTS)]
        for block in blocks:
            shapes |= {
                f"{block}gate_proj.weight": (FFN, HIDDEN),
                f"{block}up_proj.weight": (FFN, HIDDEN),
                f"{block}down_proj.weight": (HIDDEN, FFN),
            }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def padded(full, tp):
    rows = torch.cat([full, torch.full((16 - VOCAB, HIDDEN), torch.nan)])
    return rows[:8] if tp == 0 else rows[8:]


def qkv(full, tp):
    """Each rank has two of the four query groups: two query heads, a key and a value each."""
    q, k, v = full
    if tp == 0:
        parts = [q[0:4], k[0:2], v[0:2], q[4:8], k[2:4], v[2:4]]
    else:
        parts = [q[8:12], k[4:6], v[4:6], q[12:16], k[6:8], v[6:8]]
    return torch.cat(parts)


def local_state(full, stage, tp):
    """What Megatron keeps on a rank: layers and experts are counted from 0 on each."""
    state = {}
    if stage == 0:
        state["embedding.word_embeddings.weight"] = padded(full["model.embed_tokens.weight"], tp)
    for local, layer in enumerate([0, 1] if stage == 0 else [2, 3]):
        there, here = f"model.layers.{layer}.", f"decoder.layers.{local}."
        names = [f"{there}self_attn.{x}_proj" for x in "qkv"]
        state |= {
            f"{here}self_attention.linear_qkv.weight": qkv(
                [full[f"{name}.weight"] for name in names], tp
            ),
            f"{here}self_attention.linear_qkv.bias": qkv(
                [full[f"{name}.bias"] for name in names], tp
            ),
            f"{here}self_attention.linear_qkv.layer_norm_weight": full[
                f"{there}input_layernorm.weight"
            ].clone(),
            f"{here}self_attention.linear_proj.weight": full[f"{there}self_attn.o_proj.weight"][
                :, (slice(0, 8) if tp == 0 else slice(8, 16))
            ].clone(),
            f"{here}self_attention.linear_proj._extra_state": None,
        }
        if stage == 0:
            half = slice(0, 5) if tp == 0 else slice(5, 10)
            gate, up = full[f"{there}mlp.gate_proj.weight"], full[f"{there}mlp.up_proj.weight"]
            down = full[f"{there}mlp.down_proj.weight"]
            state[f"{here}mlp.linear_fc1.weight"] = torch.cat([gate[half], up[half]])
            state[f"{here}mlp.linear_fc2.weight"] = down[:, half].clone()
            continue
        state[f"{here}mlp.router.weight"] = full[f"{there}mlp.gate.weight"].clone()
        for number, expert in enumerate([0, 1] if tp == 0 else [2, 3]):
            block = f"{there}mlp.experts.{expert}."
            state[f"{here}mlp.experts.linear_fc1.weight{number}"] = torch.cat(
                [full[f"{block}gate_proj.weight"], full[f"{block}up_proj.weight"]]
            )
            down = full[f"{block}down_proj.weight"]
            state[f"{here}mlp.experts.linear_fc2.weight{number}"] = down.clone()
    if stage == 1:
        state["decoder.final_layernorm.weight"] = full["model.norm.weight"].clone()
        state["output_layer.weight"] = padded(full["lm_head.weight"], tp)
    return state


def rules(tp, count=2):
    column, row = Split(0, tp, count), Split(1, tp, count)
    qkv_names = [f"{ATTENTION}{x}_proj" for x in "qkv"]
    weights, biases = (tuple(f"{n}.{k}" for n in qkv_names) for k in ("weight", "bias"))
    fc1 = (f"{MLP}gate_proj.weight", f"{MLP}up_proj.weight")
    expert_fc1 = (f"{EXPERT}gate_proj.weight", f"{EXPERT}up_proj.weight")
    vocab = {"split": column, "padded": True}
    return [
        Rule(r".*\._extra_state", ()),
        Rule(r"embedding\.word_embeddings\.weight", "model.embed_tokens.weight", **vocab),
        Rule(r"output_layer\.weight", "lm_head.weight", **vocab),
        Rule(r"decoder\.final_layernorm\.weight", "model.norm.weight"),
        Rule(LAYER + r"self_attention\.linear_qkv\.weight", weights, column, GROUPS),
        Rule(LAYER + r"self_attention\.linear_qkv\.bias", biases, column, GROUPS),
        Rule(
            LAYER + r"self_attention\.linear_qkv\.layer_norm_weight",
            "model.layers.{layer}.input_layernorm.weight",
        ),
        Rule(LAYER + r"self_attention\.linear_proj\.weight", f"{ATTENTION}o_proj.weight", row),
        Rule(LAYER + r"mlp\.linear_fc1\.weight", fc1, column),
        Rule(LAYER + r"mlp\.linear_fc2\.weight", f"{MLP}down_proj.weight", row),
        Rule(LAYER + r"mlp\.router\.weight", f"{MLP}gate.weight"),
        Rule(LAYER + r"mlp\.experts\.linear_fc1\.weight(?P<expert>\d+)", expert_fc1),
        Rule(
            LAYER + r"mlp\.experts\.linear_fc2\.weight(?P<expert>\d+)",
            f"{EXPERT}down_proj.weight",
        ),
    ]


def table(stage, tp):
    return ParallelTable(rules(tp), {"layer": 2 * stage, "expert": 2 * tp})


def metas(full):
    return [meta_of(*item) for item in full.items()]


@pytest.fixture(scope="module")
def full():
    return full_state()


@pytest.fixture
def sources(full):
    """Of all ranks, the stage counts first."""
    places = [(stage, tp) for stage in range(2) for tp in range(2)]
    return [
        TableShards(
            local_state(full, *place), table(*place), tensors=metas(full), rank=rank, ranks=4
        )
        for rank, place in enumerate(places)
    ]


def one(state, rule, full, **options):
    table = ParallelTable([rule])
    return TableShards(state, table, tensors=metas(full), rank=0, ranks=2, **options)


def test_all_ranks_make_the_full_state(sources, full):
    joined([source.layout() for source in sources])
    made = {name: np.full(tensor.shape, np.nan, np.float32) for name, tensor in full.items()}
    for source in sources:
        assert source.made == frozenset()
        for piece in source.pieces():
            sizes = zip(piece.start, piece.tensor.shape, strict=True)
            box = tuple(slice(start, start + size) for start, size in sizes)
            if np.isnan(made[piece.name][box]).any():
                made[piece.name][box] = piece.tensor.numpy()
            assert np.array_equal(made[piece.name][box], piece.tensor.numpy()), piece.name
    for name, tensor in full.items():
        assert np.array_equal(made[name], tensor.numpy()), name


def test_pieces_are_views_of_the_local_tensors(full):
    state = local_state(full, 0, 1)
    source = TableShards(state, table(0, 1), tensors=metas(full), rank=1, ranks=4)
    storages = {t.untyped_storage().data_ptr() for t in state.values() if t is not None}
    pieces = source.pieces()
    assert {piece.tensor.untyped_storage().data_ptr() for piece in pieces} == storages
    assert source.is_same()
    for tensor in state.values():
        if tensor is not None:
            tensor.fill_(7)
    assert all((piece.tensor == 7).all() for piece in pieces)
    assert source.is_same()
    state["embedding.word_embeddings.weight"] = torch.zeros(8, HIDDEN)
    assert not source.is_same()
    assert source.pieces()[0].tensor[0, 0] == 0


def test_interleaved_groups(full):
    source = TableShards(
        {"decoder.layers.1.self_attention.linear_qkv.bias": torch.arange(16.0)},
        table(1, 1),
        tensors=metas(full),
        rank=3,
        ranks=4,
    )
    names = {f"model.layers.3.self_attn.{x}_proj.bias": x for x in "qkv"}
    found = [(names[p.name], p.start[0], p.tensor.tolist()) for p in source.pieces()]
    assert found == [
        ("q", 8, [0, 1, 2, 3]),
        ("k", 4, [4, 5]),
        ("v", 4, [6, 7]),
        ("q", 12, [8, 9, 10, 11]),
        ("k", 6, [12, 13]),
        ("v", 6, [14, 15]),
    ]


def test_padding_is_not_sent(sources):
    boxes = [
        [(p.start, tuple(p.tensor.shape)) for p in source.pieces() if p.name == "lm_head.weight"]
        for source in sources
    ]
    assert boxes == [[], [], [((0, 0), (8, HIDDEN))], [((8, 0), (3, HIDDEN))]]


def test_a_rank_that_has_nothing_but_padding():
    full = {"w": torch.ones(3, 2)}
    rule = Rule("v", "w", Split(0, 1, 2), padded=True)
    assert one({"v": torch.ones(4, 2)}, rule, full).pieces() == []


def test_a_layer_that_no_stage_has_is_an_orphan(sources, full):
    layouts = [source.layout() for source in sources]
    state = local_state(full, 1, 1)
    del state["decoder.layers.1.mlp.experts.linear_fc2.weight1"]
    short = TableShards(state, table(1, 1), tensors=metas(full), rank=3, ranks=4)
    with pytest.raises(ManifestMismatch) as caught:
        joined([*layouts[:3], short.layout()])
    assert "model.layers.3.mlp.experts.3.down_proj.weight" in caught.value.what
    with pytest.raises(ManifestMismatch) as caught:
        joined([*layouts[:2], layouts[3]])
    assert "another rank" in caught.value.what


def test_two_tensors_for_the_same_box(full):
    rule = Rule("[ab]", "model.norm.weight")
    with pytest.raises(ManifestMismatch) as caught:
        one({"a": torch.ones(HIDDEN), "b": torch.ones(HIDDEN)}, rule, full).pieces()
    assert caught.value.where == "table of rank 0"
    assert "twice" in caught.value.what
    assert "'model.norm.weight'" in caught.value.what


def test_the_first_rule_that_matches_counts(full):
    found = ParallelTable([Rule("a.*", ()), Rule("ab", "x")], unmatched="whole")
    assert found.rule_of("ab").all_names == ()
    assert found.rule_of("xab").all_names == ("xab",)
    whole = ParallelTable([Rule("ab", "x")], unmatched="whole")
    assert whole.rule_of("abc").all_names == ("abc",)  # not only its beginning


def test_names_without_a_rule(full):
    state = {"model.norm.weight": torch.ones(HIDDEN)}
    refused = TableShards(state, ParallelTable([]), tensors=metas(full), rank=0, ranks=1)
    with pytest.raises(InvalidInfo) as caught:
        refused.pieces()
    assert "'model.norm.weight'" in caught.value.what
    assert "unmatched='whole'" in caught.value.cure
    whole = ParallelTable([], unmatched="whole")
    (piece,) = TableShards(state, whole, tensors=metas(full), rank=0, ranks=1).pieces()
    assert (piece.name, piece.start) == ("model.norm.weight", (0,))


O_PROJ = "model.layers.0.self_attn.o_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
QUERIES = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (Rule("v", O_PROJ), (HIDDEN, Q // 2)),  # a split that was left out
        (Rule("v", O_PROJ, Split(0, 0, 2)), (HIDDEN, Q // 2)),  # the wrong dimension
        (Rule("v", O_PROJ, Split(1, 0, 4)), (HIDDEN, Q // 2)),  # the wrong number of ranks
        (Rule("v", O_PROJ, Split(1, 0, 3)), (HIDDEN, 5)),  # that does not divide it
        (Rule("v", O_PROJ, Split(2, 0, 2)), (HIDDEN, Q)),  # no such dimension
        (Rule("v", "lm_head.weight", Split(0, 0, 2)), (8, HIDDEN)),  # not said to be padded
        (Rule("v", "lm_head.weight", Split(0, 0, 2), padded=True), (5, HIDDEN)),  # too short
        (Rule("v", (GATE, UP), Split(0, 0, 2)), (FFN - 1, HIDDEN)),
        (Rule("v", (GATE, UP), Split(0, 0, 2)), (FFN, HIDDEN + 1)),
        (Rule("v", (GATE, UP), Split(0, 0, 2), groups=4), (FFN, HIDDEN)),  # 4 do not divide 10
        (Rule("v", (GATE, O_PROJ)), (FFN + HIDDEN, HIDDEN)),  # of other columns
        (Rule("v", "lm_head.bias"), (HIDDEN,)),
    ],
)
def test_what_is_not_what_its_rule_says(full, rule, shape):
    with pytest.raises(ManifestMismatch) as caught:
        one({"v": torch.ones(shape)}, rule, full).pieces()
    assert caught.value.where == "table of rank 0"
    assert "'v'" in str(caught.value)
    assert caught.value.expected
    assert caught.value.got
    assert caught.value.cure


@pytest.mark.parametrize(
    "make",
    [
        lambda: Split(-1, 0, 2),
        lambda: Split(0, 2, 2),
        lambda: Split(0, 0, 0),
        lambda: Rule("(", "w"),
        lambda: Rule("v", "w", padded=True),
        lambda: Rule("v", ("w", "x"), Split(0, 0, 2), padded=True),
        lambda: Rule("v", "w", groups=2),
        lambda: Rule("v", ("w", "x"), Split(1, 0, 2)),
        lambda: Rule("v", ("w", "x"), Split(0, 0, 2), groups=3),
        lambda: Rule("v", ("w", "x"), groups=0),
        lambda: ParallelTable([Rule("v", "w")], {"layer": 2}),
        lambda: ParallelTable([Rule(r"(?P<layer>.*)", "w.{layer}")], {"layer": 2}).rule_of("x"),
        lambda: ParallelTable([Rule("v", "w.{layer}")]).rule_of("v"),
        lambda: ParallelTable([Rule("v", "w.{}")]).rule_of("v"),
    ],
)
def test_what_makes_no_sense(make):
    with pytest.raises(InvalidInfo) as caught:
        make()
    assert caught.value.where
    assert caught.value.expected
    assert caught.value.got is not None
    assert caught.value.cure


def test_what_is_no_tensor(full):
    with pytest.raises(InvalidInfo) as caught:
        one({"v": None}, Rule("v", "model.norm.weight"), full).pieces()
    assert "'v'" in caught.value.what
