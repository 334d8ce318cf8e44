"""The demo calls a round verified only when the engine's tokens are the reference's, and new."""

from __future__ import annotations

import argparse
import json

import pytest

from vllm_wt.cli import demo, main
from vllm_wt.testing import engines
from vllm_wt.testing.models import ModelShape

OLD, NEW, OTHER = [[1, 2]], [[3, 4]], [[5, 6]]


@pytest.mark.parametrize(
    ("engine", "reference", "verified"),
    [(NEW, NEW, True), (OTHER, NEW, False), (OLD, OLD, False), (OLD, NEW, False)],
    ids=["right", "wrong", "nothing changed", "still the old weights"],
)
def test_verified(monkeypatch, tmp_path, capfd, engine, reference, verified):
    monkeypatch.setattr(engines, "greedy_tokens", lambda llm, prompts, count: engine)
    monkeypatch.setattr(demo, "reference_tokens", lambda folder, prompts, count: reference)
    arguments = argparse.Namespace(rounds=1, tp=1, backend="rdma")
    with demo._Screen(as_json=True, rounds=1) as screen:
        run = demo._Demo(arguments, ModelShape(), tmp_path, screen)
        run._previous = OLD
        run._report({"version": 1, "nbytes": 8, "wire_s": 0.1})
    assert json.loads(capfd.readouterr().out)["verified"] is verified
    assert run.exit_code(trainer_code=0) == (0 if verified else 1)
    assert run.exit_code(trainer_code=9) == 1


@pytest.mark.parametrize("option", ["--rounds", "--tp", "--hidden", "--layers", "--vocab"])
def test_a_number_below_one_is_refused_before_anything_starts(option, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", option, "0"])
    assert caught.value.code == 2
    assert f"argument {option}: 0 is less than 1" in capsys.readouterr().err
