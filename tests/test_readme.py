"""Every command and every piece of code in the README works as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_wt.errors import EngineError, PeerDead
from vllm_wt.testing.models import ModelShape, random_model, save_checkpoint
from vllm_wt.testing.servers import EngineProcess, ask_http

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.S | re.M)


def _commands() -> list[str]:
    return [line for kind, body in BLOCKS if kind == "bash" for line in body.splitlines()]


def _run(command: str, timeout: float, codes: tuple[int, ...] = (0,)) -> str:
    # Not what the make that runs these tests was given.
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "ARGS"))
    }
    done = subprocess.run(
        shlex.split(command),
        cwd=ROOT,
        env=inherited | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


def _demo(command: str) -> None:
    out = _run(command, timeout=280)
    assert "3 of 3 rounds verified" in out
    assert "NOT VERIFIED" not in out
    assert "`import vllm` there: ModuleNotFoundError" in out


def _this_very_command(command: str) -> None:
    recipe = _run("make -n test", timeout=60)
    assert "pytest -n 2" in recipe


def _pip(command: str) -> None:
    """What it names beside vLLM is what this repository builds."""
    packages = set(command.removeprefix("pip install ").split()) - {"vllm"}
    names = {
        re.search(r'^name = "(.*)"', path.read_text(), re.M).group(1)
        for path in ROOT.glob("plugins/*/pyproject.toml")
    }
    assert packages
    assert packages <= names


def _list(command: str) -> None:
    assert 'backend="rdma"' in _run(command, timeout=120)


def _doctor(command: str) -> None:
    out = _run(command, timeout=120)
    assert "0 problems" in out
    assert re.search(r'^ok +seen-by-vllm +.*\brdma as backend="rdma"', out, re.M)


def _server(command: str) -> None:
    """As printed, on a small model; `doctor` finds nothing wrong with it."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(random_model(ModelShape(), seed=0), Path(folder))
        setting, python, *arguments = shlex.split(command.replace("$MODEL", folder))
        assert (setting, python) == ("VLLM_SERVER_DEV_MODE=1", "python")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        small = f"--host 127.0.0.1 --port {port} --dtype float32 --max-model-len 64 --enforce-eager"
        advised = re.search(r"On a CPU add `(.*?)`", README).group(1)
        arguments += [*small.split(), "--skip-tokenizer-init", *advised.split()]
        url = f"http://127.0.0.1:{port}"
        with EngineProcess(arguments, os.environ | {"VLLM_SERVER_DEV_MODE": "1"}) as engine:
            engine.wait_until(lambda: _answers(url), 200)
            assert "0 problems" in _run(f"vllm-wt doctor {url}", timeout=60)


def _answers(url: str) -> bool:
    try:
        ask_http(url, "/health")
    except (PeerDead, EngineError):
        return False
    return True


def _planned(command: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(random_model(ModelShape(), seed=0), Path(folder))
        return _run(command.replace("$MODEL", folder), timeout=120)


def _plan(command: str) -> None:
    out = _planned(command)
    assert "Qwen3ForCausalLM, rank 1 of tensor parallel 2" in out
    assert re.search(r"^fallback +0 modules$", out, re.M)


def _plan_source(command: str) -> None:
    out = _planned(command)
    assert "fsdp:4: 4 ranks hold" in out
    assert "over 8 of 8 links" in out


def _bench(command: str) -> None:
    # Whether this host was quiet enough for the bound is not for a test to say.
    result = json.loads(_run(command, timeout=250, codes=(0, 1)).splitlines()[-1])
    assert result["name"] == command.split()[2]
    ratio, bound, details = result["ratio"], result["bound"], result["details"]
    if result["name"] == "wire":
        within = ratio >= bound and details["digests_cost"] <= details["digests_cost_bound"]
    else:
        within = ratio <= bound
    assert result["ok"] == within
    assert len(result["samples"]["ours_s"]) == len(result["samples"]["baseline_s"]) > 0
    assert details["checked"]


def _check(command: str) -> None:
    out = _run(command, timeout=280)
    assert "rdma (vllm-wt-rdma" in out
    assert "claimed 6 of 6" in out
    assert ", 0 failed, 0 known failures, " in out


CHECKS = {
    "make demo": _demo,
    "make test": _this_very_command,
    "pip install vllm vllm-wt-rdma": _pip,
    "vllm-wt list": _list,
    "vllm-wt doctor": _doctor,
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model $MODEL "
    """--weight-transfer-config '{"backend": "rdma"}'""": _server,
    "vllm-wt check rdma": _check,
    "vllm-wt bench wire --backend rdma --json": _bench,
    "vllm-wt bench commit --json": _bench,
    "vllm-wt plan --model $MODEL --tp 2 --rank 1": _plan,
    "vllm-wt plan --model $MODEL --tp 2 --source fsdp:4": _plan_source,
}


@pytest.mark.engine
@pytest.mark.parametrize("command", _commands())
def test_command(command):
    CHECKS[command](command)


def test_no_check_outlives_its_command():
    assert set(CHECKS) == set(_commands())


def test_python_blocks_compile():
    blocks = [body for kind, body in BLOCKS if kind == "python"]
    assert len(blocks) == 2
    for body in blocks:
        compile(body, "README.md", "exec")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
