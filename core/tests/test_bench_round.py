"""``vllm-wt bench round``: its arithmetic, what it refuses, and a small run of it on a CPU."""

from __future__ import annotations

import argparse
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_wt.cli import bench, bench_round, bench_round_builtin, bench_round_engine
from vllm_wt.cli.bench_round_builtin import BuiltinIpc, pickles_allowed
from vllm_wt.cli.bench_round_checksums import checksums
from vllm_wt.cli.bench_round_engine import Seen, logged
from vllm_wt.cli.bench_round_model import (
    MODELS,
    TrainerWeights,
    room_for_checkpoint,
    save_checkpoint,
    save_config,
)
from vllm_wt.cli.bench_round_result import BOUNDS, Measured, result
from vllm_wt.cli.bench_round_sides import Setting, Side
from vllm_wt.cli.bench_round_timing import copy_rate, timed_rounds
from vllm_wt.errors import BackendUnavailable, EngineError, InvalidInfo, Timeout
from vllm_wt.link import Stages
from vllm_wt.results import PushResult
from vllm_wt.sources.checkpoint import manifest_of

CPU = torch.device("cpu")
BYTES, DIGEST = Setting("bytes", "none"), Setting("digest", "auto")
SEEN = Seen([[[(7, -0.5), (8, -1.0)]]], {"a": "1", "b": "2"})
OTHER = Seen([[[(7, -0.5), (8, -1.1)]]], {"a": "1", "b": "3"})
NBYTES = 4_000_000_000
COPY_RATE = 4e12
"""By which the model's bytes take 2 ms."""


def _side(round_s: float, seen: Seen = SEEN, **others: Any) -> Side:
    seconds = [round_s / 2, round_s, 2 * round_s]
    return Side(seconds, [round_s * 3], seen, **({"memory": None} | others))


def _ours(round_s: float, seen: Seen = SEEN, **others: Any) -> Side:
    stages = Stages(start=0.001, wire=0.002, verify=0.003, load=0.004, confirm=0.005)
    push = PushResult(1, NBYTES, 310, 0.0005, round_s, {"engine0": stages})
    return _side(round_s, seen, pushes=[push] * 3, **others)


def _result(model: str = "8b", **others: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "ours": {BYTES: _ours(0.01, copy_s=0.0025), DIGEST: _ours(0.02)},
        "builtin": {"unpacked": _side(0.25), "packed": _side(0.2)},
        "fresh": SEEN,
        "copy_rate": COPY_RATE,
        "nbytes": NBYTES,
    }
    return result(Measured(**(given | others)), model, {"vllm": "0"})


# -- the arithmetic --------------------------------------------------------------------------------


def test_the_main_figures_are_those_of_the_first_setting_and_the_better_mode() -> None:
    found = _result()
    assert list(found) == [
        "name", "value", "baseline", "unit", "ratio", "bound", "ok", "samples", "details",
    ]  # fmt: skip
    assert (found["name"], found["unit"]) == ("round", "ms")
    assert (found["value"], found["baseline"], found["ratio"]) == (10.0, 200.0, 20.0)
    assert (found["bound"], found["ok"]) == (15.0, True)
    assert found["samples"] == {"ours_s": [0.005, 0.01, 0.02], "baseline_s": [0.1, 0.2, 0.4]}
    assert {m: each["round_ms"] for m, each in found["details"]["builtin"].items()} == {
        "unpacked": 250.0,
        "packed": 200.0,
    }


def test_of_each_setting() -> None:
    details = _result()["details"]
    main, second = details["settings"]["bytes:none"], details["settings"]["digest:auto"]
    assert details["limit_ms"] == 2.0
    assert (main["limit_share"], main["kernel_ms"], main["kernel_limit_share"]) == (0.2, 2.5, 0.8)
    assert main["between_kernel_and_round_ms"] == 7.5
    assert (main["gather_ms"], main["stages_ms"]["load"]) == (0.5, 4.0)
    assert (second["ratio"], second["bound"], second["within_bound"]) == (10.0, 8.0, True)
    assert (second["kernel_ms"], second["kernel_limit_share"]) == (None, None)


def test_memory_is_what_was_needed_beyond_what_there_was() -> None:
    before = {"allocated": 3_000_000, "allocated_peak": 9_000_000}
    after = {"allocated": 3_000_000, "allocated_peak": 5_500_000}
    found = _result(ours={BYTES: _ours(0.01, memory=(before, after))})
    assert found["details"]["settings"]["bytes:none"]["extra_mb"] == 2.5
    assert found["details"]["builtin"]["packed"]["extra_mb"] is None


@pytest.mark.parametrize(
    ("model", "setting", "round_s", "ok"),
    [
        ("8b", BYTES, 0.2 / 14.9, False),
        ("8b", DIGEST, 0.2 / 8.1, True),
        ("8b", DIGEST, 0.2 / 7.9, False),
        ("1.7b", BYTES, 0.2 / 25.1, True),
        ("1.7b", BYTES, 0.2 / 24.9, False),
        ("1.7b", DIGEST, 0.2 / 11.9, False),
        ("1.7b", Setting("off", "none"), 1.0, True),
        ("tiny", BYTES, 1.0, True),
    ],
    ids=str,
)
def test_bounds(model: str, setting: Setting, round_s: float, ok: bool) -> None:
    found = _result(model, ours={setting: _ours(round_s)})
    assert found["bound"] == BOUNDS.get((model, str(setting)))
    assert found["ok"] is ok


def test_a_second_setting_that_is_too_slow_is_told_and_no_more() -> None:
    found = _result(ours={BYTES: _ours(0.01), DIGEST: _ours(0.1)})
    assert found["ok"] is True
    assert found["details"]["settings"]["digest:auto"]["within_bound"] is False


def test_without_the_other_side_there_is_no_ratio_and_no_bound() -> None:
    found = _result(builtin={})
    assert [found[key] for key in ("baseline", "ratio", "bound", "ok")] == [None, None, None, True]
    assert found["samples"]["baseline_s"] == []


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"fresh": OTHER}, "fresh"),
        ({"builtin": {"unpacked": _side(0.2), "packed": _side(0.2, OTHER)}}, "builtin packed"),
        ({"ours": {BYTES: _ours(0.01), DIGEST: _ours(0.01, OTHER)}}, "digest:auto"),
    ],
    ids=["fresh", "built-in", "second setting"],
)
def test_one_engine_that_ends_up_different_is_enough(
    change: dict[str, Any], differing: str
) -> None:
    found = _result(**change)
    assert (found["ok"], found["details"]["checked"]) == (False, False)
    differences = found["details"]["differences"]
    assert differences.pop(differing) == ["b", "logprobs"]
    assert not any(differences.values())
    assert "NOT alike" in bench_round._summary(_named(found))


def test_without_a_fresh_engine_the_built_in_is_compared_with() -> None:
    found = _result(fresh=None)
    assert found["ok"] is True
    assert "fresh" not in found["details"]["differences"]
    assert "there is no room for one" in bench_round._summary(_named(found))


def test_with_nothing_to_compare_with_nothing_is_checked() -> None:
    found = _result(fresh=None, builtin={})
    assert (found["ok"], found["details"]["checked"]) == (False, False)


def test_summary() -> None:
    assert bench_round._summary(_named(_result())) == (
        "4000 MB in 310 tensors; bytes:none 10.0 ms, 20.0 times faster (at least 15); digest:auto "
        "20.0 ms, 10.0 times faster (at least 8); vLLM's own 200.0 ms; one flat copy 2.0 ms; checked"
    )


def _named(found: dict[str, Any]) -> dict[str, Any]:
    found["details"]["tensors"] = 310
    return found


# -- rounds ----------------------------------------------------------------------------------------


def test_rounds_apart_and_rounds_right_after_each_other() -> None:
    calls: list[Any] = []

    def send(number: int) -> int:
        calls.append(("send", number))
        return number

    done = timed_rounds(
        send,
        prepare=lambda content: calls.append(("prepare", content)),
        check=lambda: calls.append("check"),
        warm_up=1,
        rounds=2,
        device=CPU,
    )
    assert calls == [
        *(("prepare", 4), ("send", 1), "check"),
        *(("prepare", 3), ("send", 2), "check"),
        *(("prepare", 2), ("send", 3), "check"),
        *(("prepare", 1), ("send", 4)),
        *(("prepare", 0), ("send", 5), "check"),
    ]
    assert done.made == [2, 3]
    assert len(done.seconds) == len(done.hot) == 2
    assert min(done.seconds + done.hot) > 0


def test_the_speed_of_memory_is_some_number() -> None:
    assert copy_rate(CPU) > 1e7


# -- weights ---------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> TrainerWeights:
    save_config("tiny", tmp_path)
    return TrainerWeights(tmp_path, CPU)


def test_a_content_is_the_same_whatever_came_before(weights: TrainerWeights) -> None:
    weights.become(0)
    zero = checksums(weights.state)
    for content in (1, 2, 5, 0):
        before = checksums(weights.state)
        weights.become(content)
        watched = {name: checksums(weights.state)[name] for name in weights.watched}
        assert not watched.items() & before.items()
    assert checksums(weights.state) == zero


def test_of_contents_that_follow_each_other_no_tensor_is_the_same(weights: TrainerWeights) -> None:
    before = checksums(weights.state)
    weights.become(1)
    after = checksums(weights.state)
    assert not before.items() & after.items()


def test_what_is_watched_is_not_fused_in_vllm(weights: TrainerWeights) -> None:
    fused = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert weights.watched
    assert not [name for name in weights.watched if any(part in name for part in fused)]


def test_a_checkpoint_of_several_files(
    weights: TrainerWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_wt.cli.bench_round_model._FILE_NBYTES", 300_000)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_checkpoint("tiny", weights.state, folder)
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    files = list(folder.glob("*.safetensors"))
    for file in files:
        found |= load_file(file)
    assert len(files) > 2
    assert checksums(found) == checksums(weights.state)


@pytest.mark.parametrize(
    ("model", "tensors", "nbytes"),
    [("1.7b", 310, 3_441_149_952), ("8b", 399, 16_381_470_720)],
)
def test_the_models_are_those_of_the_figures(
    model: str, tensors: int, nbytes: int, tmp_path: Path
) -> None:
    save_config(model, tmp_path)
    manifest = manifest_of(tmp_path)
    assert (len(manifest), manifest.nbytes) == (tensors, nbytes)


def test_the_command_offers_the_models_that_there_are() -> None:
    assert set(bench_round._MODELS) == set(MODELS)


def test_there_is_no_room_for_what_is_larger_than_any_disk() -> None:
    assert room_for_checkpoint(1 << 60) is None
    assert room_for_checkpoint(1) is not None


# -- vLLM's own ------------------------------------------------------------------------------------


class RecordingLLM:
    """Takes what an engine takes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.calls.append(("init", request))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.calls.append(request["update_info"])

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def test_a_round_of_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def send(weights: Iterator[tuple[str, torch.Tensor]], arguments: dict[str, Any]) -> None:
        given.append((dict(weights), arguments["packed"], arguments["packed_buffer_size_bytes"]))
        arguments["send_mode"](
            types.SimpleNamespace(
                names=["a"], packed=True, ipc_handles=("handle",), ipc_handles_pickled=None
            )
        )

    monkeypatch.setattr(bench_round_builtin, "trainer_send_weights", lambda: send)
    llm, state = RecordingLLM(), {"a": torch.zeros(1)}
    BuiltinIpc(llm, state, packed=True).round(1)
    init, start, sent, finish = llm.calls
    assert (init, start, finish) == (("init", {"init_info": {}}), "start", "finish")
    assert given == [(state, True, 2 << 30)]
    assert pickle.loads(base64.b64decode(sent.pop("ipc_handles_pickled"))) == ("handle",)
    assert sent == {"names": ["a"], "packed": True}


# -- the engine's surroundings ---------------------------------------------------------------------


def test_pickles_are_allowed_for_one_engine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    monkeypatch.delenv(name, raising=False)
    with pickles_allowed():
        assert os.environ[name] == "1"
    assert name not in os.environ
    monkeypatch.setenv(name, "0")
    with pickles_allowed():
        assert os.environ[name] == "1"
    assert os.environ[name] == "0"


def test_what_an_engine_prints_is_shown_after_a_failure_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with logged(log):
        subprocess.run(["echo", "all is well"], check=True)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(EngineError, match="CalledProcessError") as error, logged(log):
        subprocess.run("echo the cause; exit 3", shell=True, check=True)
    assert error.value.cure
    assert capfd.readouterr() == ("", "the cause\n")


def test_an_error_of_ours_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(InvalidInfo, match="wrong"), logged(tmp_path / "log"):
        raise InvalidInfo("wrong")


def test_what_never_answers_is_given_up_at_a_deadline() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(Timeout) as error, bench_round_engine._bounded(0.05):
        time.sleep(10)
    assert error.value.cure
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# -- the command -----------------------------------------------------------------------------------


def _parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "round", *arguments])


def test_arguments() -> None:
    defaults = _parsed()
    assert (defaults.backend, defaults.against, defaults.model) == ("ipc", "vllm", "1.7b")
    assert (defaults.setting, defaults.rounds, defaults.device) == (None, 9, "cuda")
    assert (defaults.graphs, defaults.json) == (False, False)
    given = _parsed("--setting", "off:none", "--setting", "digest:device")
    assert given.setting == [("off", "none"), ("digest", "device")]


@pytest.mark.parametrize("text", ["bytes", "none:bytes", "bytes:", "bytes:none:more"])
def test_what_is_no_setting(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parsed("--setting", text)
    assert f"{text!r} is not one of off, bytes, digest, a colon" in capsys.readouterr().err


def test_vllms_own_is_refused_on_a_cpu_before_anything_starts() -> None:
    arguments = _parsed("--backend", "rdma", "--device", "cpu")
    with pytest.raises(BackendUnavailable, match="CUDA memory only") as error:
        arguments.run(arguments)
    assert "--against none" in str(error.value.cure)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_the_command_says_how_to_try_it() -> None:
    arguments = _parsed("--backend", "rdma")
    with pytest.raises(BackendUnavailable, match="no CUDA device") as error:
        arguments.run(arguments)
    assert "--device cpu --against none" in str(error.value.cure)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("engines")
def test_on_a_cpu_the_last_line_is_the_result() -> None:
    command = [sys.executable, "-m", "vllm_wt.cli", "bench", "round", "--model", "tiny"]
    done = subprocess.run(
        [*command, "--device", "cpu", "--against", "none", "--backend", "rdma", "--rounds", "2"],
        env=os.environ | {"UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.stdout, done.stderr
    summary, line = done.stdout.splitlines()
    found = json.loads(line)
    details = found["details"]
    assert done.returncode == 0
    assert [found[key] for key in ("name", "baseline", "bound", "ok")] == [
        "round",
        None,
        None,
        True,
    ]
    assert details["checked"] is True
    assert details["differences"] == {"digest:auto": [], "fresh": []}
    assert list(details["settings"]) == ["bytes:none", "digest:auto"]
    assert len(found["samples"]["ours_s"]) == 2
    assert details["graphs"] is False
    assert summary.endswith("; checked")
