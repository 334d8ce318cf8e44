"""The demo calls a round verified only when the engine's tokens are the reference's, and new."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import types

import pytest

from vllm_wt.cli import demo, main
from vllm_wt.errors import EngineError, PeerDead
from vllm_wt.testing.models import ModelShape
from vllm_wt.testing.servers import EngineProcess, ask_http

OLD, NEW, OTHER = [[1, 2]], [[3, 4]], [[5, 6]]


@pytest.mark.parametrize(
    ("engine", "reference", "reported", "verified"),
    [
        (NEW, NEW, "1", True),
        (NEW, NEW, None, True),
        (NEW, NEW, "0", False),
        (OTHER, NEW, "1", False),
        (OLD, OLD, "1", False),
        (OLD, NEW, "1", False),
    ],
    ids=[
        "right",
        "right, in a vLLM without versions",
        "wrong version",
        "wrong tokens",
        "nothing changed",
        "still the old weights",
    ],
)
def test_verified(monkeypatch, tmp_path, capfd, engine, reference, reported, verified):
    monkeypatch.setattr(demo, "reference_tokens", lambda folder, prompts, count: reference)
    arguments = argparse.Namespace(rounds=1, tp=1, backend="rdma", server=False)
    with demo._Screen(as_json=True, rounds=1) as screen:
        run = demo._Demo(arguments, ModelShape(), tmp_path, screen)
        run._engine = types.SimpleNamespace(
            tokens=lambda prompts, count: engine, version=lambda: reported
        )
        run._previous = OLD
        run._report({"version": 1, "nbytes": 8, "wire_s": 0.1})
    assert json.loads(capfd.readouterr().out)["verified"] is verified
    assert run.exit_code(trainer_code=0) == (0 if verified else 1)
    assert run.exit_code(trainer_code=9) == 1


@pytest.mark.parametrize("option", ["--rounds", "--tp", "--hidden", "--layers", "--vocab"])
def test_a_number_below_one_is_refused_before_anything_starts(option, capsys):
    assert _refused(["demo", option, "0"], capsys, option).endswith("0 is less than 1\n")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tp", "3"], "3 workers cannot share the 8 attention heads (hidden/32) and 4 key-value"),
        (["--tp", "2", "--hidden", "64"], "the 2 attention heads (hidden/32) and 1 key-value"),
        (["--hidden", "96"], "96 is not a multiple of 64"),
        (["--vocab", "1"], "1 is less than 16: too few tokens"),
    ],
)
def test_a_model_that_cannot_be_is_refused_before_anything_starts(arguments, reason, capsys):
    assert reason in _refused(["demo", *arguments], capsys, arguments[0])


def _refused(arguments, capsys, option):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"argument {option}: " in error
    return error


def test_a_stop_signal_ends_the_command_with_its_code_and_gives_the_handlers_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(SystemExit) as caught:
            _stopped(number)
        assert caught.value.code == 128 + number
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def _stopped(number):
    with demo._stoppable(), contextlib.ExitStack() as cleaning:
        cleaning.callback(signal.raise_signal, number)  # changes nothing by then
        signal.raise_signal(number)


ENGINE = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("worker", worker.pid, flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["sys.exit(7)", "signal.pause()"], ids=["died", "stubborn"])
def test_closing_an_engine_ends_its_whole_group(monkeypatch, tmp_path, then):
    monkeypatch.setattr("vllm_wt.testing.servers._STOP_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "engine_stand_in.py").write_text(ENGINE.format(then=then))
    engine = EngineProcess(["-m", "engine_stand_in"], os.environ)
    try:
        engine.wait_until(lambda: "worker" in engine.log.read_text(), 60)
        worker = int(engine.log.read_text().split()[1])
        if then.startswith("sys.exit"):
            with pytest.raises(EngineError, match="exit code 7") as died:
                engine.wait_until(lambda: False, 60)
            assert f"worker {worker}" in died.value.got
        else:
            engine.close()
    finally:
        engine.close()
    assert engine.process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(engine.process.pid, 0)
    assert not engine.log.exists()


def test_no_server_is_a_dead_peer():
    with pytest.raises(PeerDead, match=r"127\.0\.0\.1:9"):
        ask_http("http://127.0.0.1:9", "/health")


def test_the_trainer_says_what_failed_without_a_traceback(tmp_path):
    config = {"folder": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_wt.cli.demo_trainer", json.dumps(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("trainer: No engine answers at")
    assert "Traceback" not in done.stderr


def test_the_trainer_is_told_where_to_log(monkeypatch, tmp_path):
    given = []

    def popen(command, **_):
        given.append(json.loads(command[-1]))
        raise InterruptedError

    monkeypatch.setattr(demo.subprocess, "Popen", popen)
    arguments = argparse.Namespace(backend="echo", rounds=1, log="rounds.jsonl")
    with demo._Screen(as_json=True, rounds=1) as screen:
        run = demo._Demo(arguments, ModelShape(), tmp_path, screen)
        run._engine = types.SimpleNamespace(address={"socket": "there"})
        with pytest.raises(InterruptedError):
            run._train()
    assert given[0]["log"] == "rounds.jsonl"
