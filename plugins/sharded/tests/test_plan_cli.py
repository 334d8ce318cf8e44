"""``vllm-wt plan --source`` on real vLLM models, without weights that mean anything.

One process runs all plans, since importing vLLM takes longer than any of them. Who needs and who holds
what is worked out here, element by element, from how each side divides its layers.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.sources import DeclaredShards

pytestmark = pytest.mark.xdist_group("plan-cli")

README = Path(__file__).parents[1] / "README.md"
COMMANDS = re.findall(r"^ {4}vllm-wt (plan .*)$", README.read_text(), re.MULTILINE)
DRAWS = importlib.util.find_spec("matplotlib") is not None

RUNNER = """
import contextlib, io, json, sys
from vllm_wt.cli import main

for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(arguments)
    print(json.dumps({"code": code, "stderr": said.getvalue()}), flush=True)
"""
"""Runs plans, each followed by a line with its exit code and its stderr."""

HIDDEN, WIDE, EXPERT, VOCABULARY = 64, 128, 32, 256
HEADS, KV_HEADS, HEAD = 4, 2, 16
LAYERS, EXPERTS = 2, 4
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
CONFIGS = {
    "tied": COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    },
    "experts": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
NBYTES = 2
"""Of an element."""


def shapes(model):
    """The tensors of a model by their names on the Hub."""
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        own = f"model.layers.{n}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{own}.self_attn.{name}_proj.weight"] = (heads * HEAD, HIDDEN)
        found[f"{own}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            found[f"{own}.{name}.weight"] = (HEAD,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{own}.{name}.weight"] = (HIDDEN,)
        mlps = {f"{own}.mlp": WIDE}
        if model == "experts":
            found[f"{own}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            mlps = {f"{own}.mlp.experts.{e}": EXPERT for e in range(EXPERTS)}
        for mlp, width in mlps.items():
            found[f"{mlp}.gate_proj.weight"] = found[f"{mlp}.up_proj.weight"] = (width, HIDDEN)
            found[f"{mlp}.down_proj.weight"] = (HIDDEN, width)
    if model == "experts":
        found["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return found


def expert_of(name):
    match = re.search(r"\.experts\.(\d+)\.", name)
    return match and int(match[1])


def half(mask, dim, which):
    """One of two halves along a dimension."""
    begin, end = (size * mask.shape[dim] // 2 for size in (which, which + 1))
    mask[(slice(None),) * dim + (slice(begin, end),)] = True


def needed(name, shape, worker, expert_parallel):
    """Which elements one of two tensor-parallel ranks needs."""
    mask = np.zeros(shape, dtype=bool)
    if expert_parallel and expert_of(name) is not None:
        mask[...] = expert_of(name) // (EXPERTS // 2) == worker
    elif re.search(r"norm\.weight|mlp\.gate\.", name):
        mask[...] = True
    else:
        half(mask, 1 if re.search("o_proj|down_proj", name) else 0, worker)
    return mask


def rows_held(name, shape, rank, count):
    """Which elements are in one of so many shards of the rows."""
    mask = np.zeros(shape, dtype=bool)
    each = -(-shape[0] // count)
    mask[rank * each : (rank + 1) * each] = True
    return mask


def experts_held(name, shape, rank, count):
    """Which elements are in one of so many groups of experts."""
    if expert_of(name) is None:
        return rows_held(name, shape, rank, count)
    return np.full(shape, expert_of(name) // (EXPERTS // count) == rank)


def stage_and_rows_held(name, shape, rank, count):
    """The same of two stages of a layer each, which have half of the ranks."""
    layer = re.search(r"layers\.(\d+)\.", name)
    stage = int(layer[1]) if layer else int("embed" not in name)
    stages, shard = divmod(rank, count // 2)
    return rows_held(name, shape, shard, count // 2) & (stage == stages)


def links(model, held, ranks, expert_parallel=False):
    """Bytes that each of two workers needs of what each rank holds."""
    return [
        [
            NBYTES
            * sum(
                int((held(n, s, rank, ranks) & needed(n, s, worker, expert_parallel)).sum())
                for n, s in shapes(model).items()
            )
            for worker in range(2)
        ]
        for rank in range(ranks)
    ]


PLANS = {
    "tied": ("tied", "--tp", "2", "--source", "fsdp:2"),
    "uneven": ("tied", "--tp", "2", "--source", "fsdp:6"),
    "stages": ("tied", "--tp", "2", "--source", "pp:2+fsdp:2"),
    "experts": ("experts", "--tp", "2", "--ep", "--source", "ep:2"),
    "experts by rows": ("experts", "--tp", "2", "--ep", "2", "--source", "fsdp:2"),
    "experts cut": ("experts", "--tp", "2", "--source", "ep:4"),
    "replicas": ("tied", "--tp", "2", "--source", "hsdp:3x2", "--replicas", "2", "--links", "1"),
    "alone": ("tied", "--source", "fsdp:1"),
    "files": ("tied", "--tp", "2", "--source", "layout-*.json"),
    "no layers": ("tied", "--source", "pp:3"),
    "no experts": ("tied", "--tp", "2", "--ep", "--source", "fsdp:2"),
    "lacking": ("tied", "--tp", "2", "--source", "lacking.json"),
    "expert parallel rank": ("experts", "--tp", "2", "--ep", "--rank", "1"),
    "no picture": ("tied", "--source", "fsdp:1", "--plot", "links.pdf"),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each plan said, by name or by the command of the README: exit code, stdout, stderr."""
    folder = tmp_path_factory.mktemp("models")
    _save_models(folder)
    _save_layouts(folder)
    runs = {
        name: ["plan", "--json", "--model", model, *options]
        for name, (model, *options) in PLANS.items()
    }
    runs |= {command: shlex.split(command.replace("$MODEL", "experts")) for command in COMMANDS}
    runs["text"] = [each for each in runs["experts"] if each != "--json"]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(list(runs.values()))],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"},  # vLLM logs to stdout
    )
    assert done.returncode == 0, done.stderr
    found, before = [], []
    for line in done.stdout.splitlines():
        if line.startswith('{"code"'):
            found.append(json.loads(line) | {"stdout": "\n".join(before), "folder": folder})
            before = []
        else:
            before.append(line)
    return dict(zip(runs, found, strict=True))


def _save_models(folder):
    from safetensors.torch import save_file

    for model, config in CONFIGS.items():
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(config))
        weights = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes(model).items()}
        save_file(weights, folder / model / "model.safetensors")


def _save_layouts(folder):
    """What two ranks of a trainer write, which have one half of the columns, or of a vector, each; and
    what one writes that lacks a tensor."""
    metas = [TensorMeta(name, "bfloat16", shape) for name, shape in shapes("tied").items()]
    for rank in range(2):
        declared = {}
        for meta in metas:
            size = [*meta.shape[:-1], meta.shape[-1] // 2]
            start = [0] * (len(size) - 1) + [rank * size[-1]]
            declared[meta.name] = start, meta.shape, torch.zeros(size, dtype=torch.bfloat16)
        source = DeclaredShards(declared, rank=rank, ranks=2)
        wire = source.layout().to_wire()
        (folder / f"layout-{rank}.json").write_text(json.dumps(wire))
    lacking = {
        meta.name: (
            [0] * len(meta.shape),
            meta.shape,
            torch.zeros(meta.shape, dtype=torch.bfloat16),
        )
        for meta in metas
        if "layers.1.mlp.up_proj" not in meta.name
    }
    wire = DeclaredShards(lacking, tensors=metas, rank=0, ranks=1).layout().to_wire()
    (folder / "lacking.json").write_text(json.dumps(wire))


def columns_held(name, shape, rank, count):
    mask = np.zeros(shape, dtype=bool)
    half(mask, len(shape) - 1, rank)
    return mask


@pytest.mark.parametrize(
    ("name", "held", "ranks", "expert_parallel"),
    [
        ("tied", rows_held, 2, False),
        ("uneven", rows_held, 6, False),
        ("stages", stage_and_rows_held, 4, False),
        ("experts", experts_held, 2, True),
        ("experts by rows", rows_held, 2, True),
        ("experts cut", experts_held, 4, False),
        ("files", columns_held, 2, False),
    ],
)
def test_every_needed_byte_comes_once_from_who_holds_it(said, name, held, ranks, expert_parallel):
    plan = json.loads(said[name]["stdout"])
    expected = links(PLANS[name][0], held, ranks, expert_parallel)
    assert plan["source"]["links"] == expected
    into = np.sum(expected, axis=0).tolist()
    assert [rank["rank_bytes"] for rank in plan["ranks"]] == into
    assert plan["source"]["bytes"] == sum(into)
    assert plan["source"]["out"]["max"] == np.sum(expected, axis=1).max()
    assert plan["source"]["in"]["max"] == max(into)
    assert plan["expert_parallel"] is expert_parallel
    assert plan["source"]["bound"]["ratio"] >= 1 - 1e-4


def test_replicas_share_and_engines_are_alike(said):
    plan = json.loads(said["replicas"]["stdout"])
    source = np.array(plan["source"]["links"])
    assert source.shape == (6, 4)
    assert (source[:, :2] == source[:, 2:]).all()
    # Ranks 0, 2 and 4 have the same, and so have the others.
    expected = links("tied", rows_held, 2)
    shards = [source[shard::2, :2].sum(axis=0).tolist() for shard in range(2)]
    assert shards == expected
    assert source.sum(axis=1).max() < 1.05 * source.sum(axis=1).mean()
    assert plan["replicas"] == plan["source"]["replicas"] == 2
    assert len(plan["ranks"]) == 2
    bound = plan["source"]["bound"]
    assert bound["out_bytes"] == pytest.approx(source.sum() / 6, rel=0.01)
    assert bound["in_bytes"] == source.sum(axis=0).max()
    (seconds,) = plan["source"]["seconds"]
    busiest = np.array(plan["source"]["read_links"])
    assert seconds["gigabytes_per_s"] == 1
    assert seconds["seconds"] == pytest.approx(
        max(busiest.sum(axis=0).max(), busiest.sum(axis=1).max()) / 1e9
    )


def test_one_to_one(said):
    plan = json.loads(said["alone"]["stdout"])
    whole = NBYTES * sum(int(np.prod(shape)) for shape in shapes("tied").values())
    assert plan["model_bytes"] == plan["source"]["model_bytes"] == whole
    assert plan["source"]["links"] == plan["source"]["read_links"] == [[whole]]
    assert plan["source"]["reads"] == len(shapes("tied"))
    assert [seconds["gigabytes_per_s"] for seconds in plan["source"]["seconds"]] == [50]


def test_where_the_names_are_from(said):
    found = {name: json.loads(said[name]["stdout"])["names_from"] for name in ("tied", "files")}
    assert found == {"tied": "safetensors", "files": "source"}


def test_how_modules_are_loaded(said):
    plan = json.loads(said["experts"]["stdout"])
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1]
    for rank in plan["ranks"]:
        # Per layer four norms, qkv, o, gate and experts; embedding, norm and head.
        tiers = [rank[tier]["modules"] for tier in ("direct", "layerwise", "fallback")]
        assert sum(tiers) == 8 * LAYERS + 3
        assert rank["full"] == {"tensors": 0, "bytes": 0}
        assert rank["whole"] is None
        own_experts = EXPERTS // 2 * 3 * LAYERS
        assert rank["tensors_needed"] == plan["tensors"] - own_experts


def test_one_rank_of_an_expert_parallel_engine(said):
    plan = json.loads(said["expert parallel rank"]["stdout"])
    assert plan["expert_parallel"] is True
    assert all(expert_of(name) in (0, 1) for name in plan["unused"])
    assert len(plan["unused"]) == EXPERTS // 2 * 3 * LAYERS


def test_text(said):
    lines = said["text"]["stdout"].splitlines()
    assert len(lines) <= 25
    assert re.match(
        "Qwen3MoeForCausalLM at tensor parallel 2 with expert parallelism, as", lines[0]
    )
    assert "trainer    ep:2: 2 ranks hold" in lines[1]
    text = "\n".join(lines)
    assert re.search(r"^rank 1 +[\d.]+ kB +[\d.]+ kB$", text, re.MULTILINE)
    assert re.search(r"^full +no tensor has to be put together", text, re.MULTILINE)
    assert re.search(r"^modules +direct \d+, layerwise \d+, fallback 0 on each", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("no layers", "cannot be divided into 3 stages.*Got: 2 layers.*Cure: choose at most 2"),
        ("no experts", "Number of experts in the model must be greater than 0"),
        (
            "lacking",
            r"Nobody holds a part of the tensor 'model\.layers\.1\.mlp\.up_proj\.weight' .*worker 0",
        ),
        (
            "no picture",
            "No picture can be written there"
            if DRAWS
            else r"pip install 'vllm-wt-sharded\[plot\]'",
        ),
    ],
)
def test_what_is_refused(said, name, what):
    run = said[name]
    assert (run["code"], run["stdout"]) == (1, "")
    (line,) = [line for line in run["stderr"].splitlines() if line.startswith("vllm-wt: ")]
    assert re.search(what, line)
    assert "Cure: " in line
    assert "Traceback" not in run["stderr"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readmes_commands(said, command):
    run = said[command]
    if "--plot" in command and not DRAWS:
        pytest.skip("matplotlib is not installed")
    assert run["code"] == 0, run["stderr"]
    assert "times the least possible" in run["stdout"]
    plot = re.search(r"--plot (\S+)", command)
    if plot is not None:
        assert (run["folder"] / plot[1]).read_bytes().startswith(b"\x89PNG")


def test_the_readme_has_two_commands():
    assert len(COMMANDS) == 2
