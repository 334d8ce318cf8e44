"""``vllm-wt plan`` on real vLLM models, without weights and without the other ranks.

One process runs many plans, since importing vLLM takes longer than any of them. What a rank needs is
worked out here from how tensor parallelism cuts each layer.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from vllm_wt.cli import main

pytestmark = pytest.mark.xdist_group("cli-plan")

RUNNER = """
import contextlib, io, json, os, resource, sys
import torch, transformers
from transformers.utils import logging
from vllm_wt.cli import main

logging.disable_progress_bar()
GIB = 1 << 30
models, runs = json.loads(sys.argv[1])
for folder, (config, settings, weights) in models.items():
    config = getattr(transformers, config)(**settings)
    with torch.device("cpu" if weights else "meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder) if weights else config.save_pretrained(folder)
for arguments, frugal in runs:
    said = io.StringIO()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    if frugal:
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIB, limit[1]))
    with contextlib.redirect_stderr(said):
        code = main(["plan", *arguments])
    resource.setrlimit(resource.RLIMIT_AS, limit)
    print(json.dumps({"code": code, "stderr": said.getvalue()}), flush=True)
"""
"""Makes models and runs plans, each followed by a line with its exit code and its stderr. All that
it has on stdout otherwise comes from the command."""

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}
MIXTURE = {"head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
MODELS = {
    "llama": ("LlamaConfig", SMALL, True),
    "llama-config": ("LlamaConfig", SMALL, False),
    "llama-padded": ("LlamaConfig", SMALL | {"vocab_size": 200}, False),
    "qwen2": ("Qwen2Config", SMALL, True),
    "qwen3": ("Qwen3Config", SMALL | {"head_dim": 16, "tie_word_embeddings": True}, True),
    "qwen3-tied-config": (
        "Qwen3Config",
        SMALL | {"head_dim": 16, "tie_word_embeddings": True},
        False,
    ),
    "qwen3-moe": ("Qwen3MoeConfig", SMALL | EXPERTS | MIXTURE, True),
    "qwen3-moe-config": ("Qwen3MoeConfig", SMALL | EXPERTS | MIXTURE, False),
    "deepseek-v2": ("DeepseekV2Config", SMALL | EXPERTS | LATENT, True),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 256}
        | {"dtype": "bfloat16"},
        True,
    ),
    "bloom": (  # position biases are computed while it is built, so not on the meta device
        "BloomConfig",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "dtype": "bfloat16"},
        True,
    ),
    "mamba2": (
        "Mamba2Config",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "state_size": 16}
        | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "dtype": "bfloat16"},
        False,
    ),
    "llama-8b": (
        "LlamaConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        | {"dtype": "bfloat16"},
        False,
    ),
}
"""Class of the configuration, its arguments, and whether the folder has weights too."""

WHOLE = {
    "qwen2": r"norm\.weight$",
    "qwen3": r"norm\.weight$",
    "qwen3-moe": r"norm\.weight$|mlp\.gate\.weight$",
    "deepseek-v2": r"norm\.weight$|mlp\.gate\.weight$|q_a_proj|kv_a_proj_with_mqa",
    "gpt2": r"ln_\w+\.\w+$|wpe|c_proj\.bias$",
    "bloom": r"layernorm\.\w+$|ln_f\.\w+$|dense\.bias$|4h_to_h\.bias$",
}
"""What every rank has in full; the rest is cut in two at tensor parallel 2."""

PLANS = {
    **{
        name: (folder, "--tp", str(tp), "--rank", str(rank))
        for name, folder, tp, rank in (
            ("all of it", "llama", 1, 0),
            ("from config", "llama-config", 1, 0),
            ("a half", "llama", 2, 0),
            ("other half", "llama", 2, 1),
            ("a quarter", "llama", 4, 3),
            ("padded 0", "llama-padded", 2, 0),
            ("padded 1", "llama-padded", 2, 1),
            ("tied from weights", "qwen3", 1, 0),
            ("tied from config", "qwen3-tied-config", 1, 0),
            ("experts from weights", "qwen3-moe", 2, 1),
            ("experts from config", "qwen3-moe-config", 2, 1),
            ("fallback", "mamba2", 2, 1),
            ("large", "llama-8b", 2, 1),
            ("three", "llama", 3, 2),
            ("unused", "llama-frequencies", 1, 0),
            ("missing", "llama-missing", 1, 0),
            ("unknown", "unknown", 1, 0),
            ("quantised config", "llama-fp8-config", 1, 0),
            *((name, name, 2, 1) for name in WHOLE),
        )
    },
    "quantised": ("llama", "--quantization", "fp8"),
    "no such quantisation": ("llama", "--quantization", "no-such"),
}
LLAMAS = {"llama", "llama-config", "llama-padded", "llama-missing", "llama-frequencies", "unknown"}
LLAMAS |= {"llama-fp8-config"}
FRUGAL = {"large"}
"""With a GiB of address space to spare; the model's weights would take eight."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plans(folders):
    """What the plans of one family said."""
    _save_variants(folders)
    return _said(folders, [name for name, (folder, *_) in PLANS.items() if folder in LLAMAS])


@pytest.fixture(scope="module")
def others(folders):
    """What those of the others said."""
    return _said(folders, [name for name, (folder, *_) in PLANS.items() if folder not in LLAMAS])


def _said(folders, names):
    """What plans said, by name, with --json: exit code, stderr, and the object or None; and the first
    one without."""
    folder_of = {name: PLANS[name][0] for name in names}
    models = {str(folders / f): MODELS[f] for f in folder_of.values() if f in MODELS}
    runs = [
        (["--json", "--model", str(folders / folder_of[name]), *PLANS[name][1:]], name in FRUGAL)
        for name in names
    ]
    runs.append((["--model", str(folders / folder_of[names[0]]), *PLANS[names[0]][1:]], False))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps([models, runs])],
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
            found.append(json.loads(line) | {"stdout": before})
            before = []
        else:
            before.append(line)
    named = dict(zip([*names, "text"], found, strict=True))
    for name in names:
        named[name]["plan"] = json.loads("".join(named[name]["stdout"]) or "null")
    return named


def _save_variants(folders):
    """A checkpoint with a tensor that vLLM leaves out, one that lacks a tensor, a foreign one."""
    import torch
    from safetensors.torch import save_file

    llama = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    tensors = {name: torch.zeros(shape) for name, shape in llama_shapes().items()}
    quantised = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for name, config in (
        ("llama-fp8-config", llama | quantised),
        ("llama-frequencies", llama),
        ("llama-missing", llama),
        ("unknown", llama | {"architectures": ["NoSuchModel"], "model_type": "no_such"}),
    ):
        (folders / name).mkdir()
        (folders / name / "config.json").write_text(json.dumps(config))
    file = "model.safetensors"
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(tensors | extra, folders / "llama-frequencies" / file)
    save_file(tensors, folders / "unknown" / file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folders / "llama-missing" / file)


def llama_shapes():
    """The tensors of the small Llama by their names on the Hub."""
    shapes = {"model.embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64)}
    for n in range(2):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (64, 64),
            f"{layer}.self_attn.k_proj.weight": (32, 64),
            f"{layer}.self_attn.v_proj.weight": (32, 64),
            f"{layer}.self_attn.o_proj.weight": (64, 64),
            f"{layer}.mlp.gate_proj.weight": (128, 64),
            f"{layer}.mlp.up_proj.weight": (128, 64),
            f"{layer}.mlp.down_proj.weight": (64, 128),
            f"{layer}.input_layernorm.weight": (64,),
            f"{layer}.post_attention_layernorm.weight": (64,),
        }
    return shapes | {"model.norm.weight": (64,)}


NORMS = 5 * 64
EMBEDDINGS = 2 * 256 * 64
KEYS_AND_VALUES = 2 * 2 * 32 * 64
OTHERS = 2 * (2 * 64 * 64 + 3 * 128 * 64)
"""Elements of the small Llama."""


def test_everything_is_needed_without_tensor_parallelism(plans):
    plan = plans["all of it"]["plan"]
    assert plans["all of it"]["code"] == 0
    assert plan["architecture"] == "LlamaForCausalLM"
    assert (plan["tensors"], plan["tensors_needed"], plan["runs"]) == (21, 21, 21)
    nbytes = 2 * (NORMS + EMBEDDINGS + KEYS_AND_VALUES + OTHERS)
    assert plan["model_bytes"] == plan["rank_bytes"] == plan["read_bytes"] == nbytes
    assert (plan["unused"], plan["whole"], plan["fallback"]["modules"]) == ([], None, 0)
    # Per layer two norms, qkv, o, gate and up, down; embedding, norm and head.
    assert plan["direct"]["modules"] + plan["layerwise"]["modules"] == 2 * 6 + 3
    assert plan["direct"]["modules"] >= 5


@pytest.mark.parametrize("name", ["a half", "other half"])
def test_half_of_all_but_the_norms(plans, name):
    nbytes = 2 * (NORMS + (EMBEDDINGS + KEYS_AND_VALUES + OTHERS) // 2)
    assert plans[name]["plan"]["rank_bytes"] == nbytes


def test_key_heads_are_kept_whole(plans):
    """Four ranks, two heads of keys: each rank has one head, and shares it."""
    nbytes = 2 * (NORMS + (EMBEDDINGS + OTHERS) // 4 + KEYS_AND_VALUES // 2)
    assert plans["a quarter"]["plan"]["rank_bytes"] == nbytes


@pytest.mark.parametrize(("name", "rows"), [("padded 0", 128), ("padded 1", 72)])
def test_a_vocabulary_is_cut_where_it_is_padded(plans, name, rows):
    nbytes = 2 * (NORMS + 2 * rows * 64 + (KEYS_AND_VALUES + OTHERS) // 2)
    assert plans[name]["plan"]["rank_bytes"] == nbytes


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_families(others, folders, name):
    from safetensors import safe_open

    with safe_open(folders / name / "model.safetensors", framework="pt") as file:
        sizes = {key: 2 * file.get_tensor(key).numel() for key in file.keys()}  # noqa: SIM118
    whole = sum(size for key, size in sizes.items() if re.search(WHOLE[name], key))
    plan = others[name]["plan"]
    assert plan["tensors"] == len(sizes)
    assert plan["model_bytes"] == sum(sizes.values())
    assert plan["rank_bytes"] == whole + (sum(sizes.values()) - whole) // 2
    assert plan["rank_bytes"] < plan["model_bytes"]


def test_a_config_alone_is_enough(plans):
    _assert_same(plans, "all of it", "from config")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_a_config_alone_is_enough_for_other_families(others, kind):
    _assert_same(others, f"{kind} from weights", f"{kind} from config")


def _assert_same(plans, from_weights, from_config):
    own = {"model", "names_from", "seconds"}
    first, second = (
        {key: value for key, value in plans[name]["plan"].items() if key not in own}
        for name in (from_weights, from_config)
    )
    assert first == second
    assert plans[from_weights]["plan"]["names_from"] == "safetensors"
    assert plans[from_config]["plan"]["names_from"] == "config"


@pytest.mark.slow
def test_no_memory_is_taken_for_weights(others):
    assert others["large"]["code"] == 0, others["large"]["stderr"]
    plan = others["large"]["plan"]
    assert plan["model_bytes"] == 16_060_522_496
    assert plan["rank_bytes"] == (16_060_522_496 + 2 * 65 * 4096) // 2


@pytest.mark.slow
def test_fallbacks_are_grouped_by_their_reason(others):
    fallback = others["fallback"]["plan"]["fallback"]
    assert fallback["modules"] == 2
    (group,) = fallback["reasons"]
    assert group["modules"] == 2
    assert group["first"] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert "copy_ at" in group["reason"]


def test_quantised_layers_are_made_anew(plans):
    plan = plans["quantised"]["plan"]
    groups = [each for each in plan["layerwise"]["reasons"] if "Fp8" in each["reason"]]
    assert [each["modules"] for each in groups] == [8]
    assert plan["quantization"] == "fp8"


def test_unused_tensors_are_named(plans):
    plan = plans["unused"]["plan"]
    assert plan["unused"] == ["model.layers.1.self_attn.rotary_emb.inv_freq"]
    assert plan["tensors_needed"] == plan["tensors"] - 1 == 21
    assert plan["rank_bytes"] == plan["model_bytes"] - 8 * 4


@pytest.mark.parametrize(
    ("name", "what", "cure"),
    [
        (
            "three",
            r"attention heads \(4\) must be divisible by.*\(3\)",
            "divides the model's heads",
        ),
        ("missing", "would keep their old values.*gate_up_proj.weight", "every tensor"),
        ("unknown", "no_such|NoSuchModel", "architectures"),
        ("no such quantisation", "no-such", "method that this vLLM has"),
        ("quantised config", "the checkpoint is quantised", "safetensors files"),
    ],
)
def test_what_vllm_refuses(plans, name, what, cure):
    run = plans[name]
    assert run["code"] == 1
    assert run["plan"] is None
    (line,) = [line for line in run["stderr"].splitlines() if line.startswith("vllm-wt: ")]
    assert re.search(what, line)
    assert re.search(f"Cure: .*{cure}", line)
    assert "Traceback" not in run["stderr"]


def test_text(plans):
    text = "\n".join(plans["text"]["stdout"])
    plan = plans["all of it"]["plan"]
    assert "LlamaForCausalLM, rank 0 of tensor parallel 1" in text
    assert re.search(rf"^reads +{plan['runs']}, of ", text, re.MULTILINE)
    assert re.search(rf"^direct +{plan['direct']['modules']} modules", text, re.MULTILINE)
    for group in plan["layerwise"]["reasons"]:
        assert f"  {group['modules']} x {group['reason']} ({group['first'][0]}" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "{}/nothing"], "There is no such model folder"),
        (["--model", "{}/empty"], "The folder has no config.json"),
        (["--model", "{}/model", "--rank", "1"], "There is no rank 1 of tensor parallel 1"),
        (["--model", "{}/model", "--tp", "2", "--rank", "2"], "Expected: 0 to 1. Got: 2"),
        (["--model", "{}/model", "--tp", "2", "--rank", "-1"], "There is no rank -1"),
        (["--model", "{}/model", "--tp", "0"], "Expected: 1 or more. Got: 0"),
        (["--model", ""], "No model folder was given"),
        (["--model", "{}/broken"], "A model's config.json cannot be read"),
    ],
)
def test_refused_before_vllm_is_imported(tmp_path, capsys, options, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"archi')
    before = set(sys.modules)
    assert main(["plan", "--json", *(option.format(tmp_path) for option in options)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Cure: " in err
    assert not {"vllm"} & (set(sys.modules) - before)


def test_without_vllm(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["plan", "--model", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "vLLM is not installed" in err
    assert "Cure: pip install vllm" in err
