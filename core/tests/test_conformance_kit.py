"""The kit's own machinery: what it says when a backend, or its author, is wrong."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from vllm_wt import native, registry
from vllm_wt.cli import main
from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo
from vllm_wt.registry import Backend, Registry
from vllm_wt.spec import BackendSpec, Capability, Kind
from vllm_wt.testing.conformance import BackendConformance
from vllm_wt.testing.conformance.gate import (
    is_of_mapping,
    mapping_only,
    needs,
    of_the_package,
    transports_only,
    why_not,
)
from vllm_wt.testing.conformance.known import read_known_failures
from vllm_wt.testing.conformance.memory import zeros
from vllm_wt.testing.conformance.package import Package
from vllm_wt.testing.conformance.process import Ended, Forker, Hang, Process, Untyped
from vllm_wt.testing.conformance.report import Report
from vllm_wt.testing.conformance.suite import transport_of

from .support.native_engine import MyEngine

LIGHT = "test_the_entry_point_imports_nothing_heavy"


def spec(**fields):
    return BackendSpec(
        **{"name": "t", "kind": Kind.TRANSPORT, "transport": "t_mod:T", "summary": "", **fields}
    )


class Checks:
    @needs(Capability.ZERO_COPY)
    def test_claimed(self):
        pass


@transports_only
class TransportChecks:
    def test_any(self):
        pass


def test_a_check_waits_for_a_claim():
    assert why_not(Checks.test_claimed, spec()) == "zero-copy is undeclared"
    without = spec(unsupported={Capability.ZERO_COPY: "no way"})
    assert why_not(Checks.test_claimed, without) == "zero-copy is unsupported: no way"
    assert why_not(Checks.test_claimed, spec(capabilities={Capability.ZERO_COPY})) is None


def test_a_check_of_transports_is_for_them_only():
    engine = spec(kind=Kind.ENGINE, transport=None, worker="t:W", trainer="t:T")
    assert why_not(TransportChecks.test_any, engine) == "for backends of kind transport only"
    assert why_not(TransportChecks.test_any, spec()) is None


@of_the_package
class PackageChecks:
    def test_any(self):
        pass


def test_an_engine_in_vllms_own_form_is_held_to_what_its_package_says_alone():
    own = spec(kind=Kind.NATIVE, transport=None, native="t:N", capabilities={Capability.ZERO_COPY})
    assert why_not(PackageChecks.test_any, own) is None
    assert why_not(Checks.test_claimed, own).startswith("for backends that WeightSync drives")
    assert why_not(TransportChecks.test_any, own).startswith("for backends that WeightSync drives")


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (MyEngine, []),
        (object, ["t:N does not derive from", "init_info_cls", "update_info_cls"]),
        (type("Half", (native.WeightTransferEngine,), {}), ["lacks", "init_info_cls", "update_"]),
        (type("Odd", (MyEngine,), {"shutdown": lambda self, hard: None}), ["Odd.shutdown"]),
    ],
    ids=["good", "foreign", "unfinished", "other arguments"],
)
def test_the_class_of_an_engine_in_vllms_own_form(monkeypatch, cls, says):
    found = Registry()
    found.add(Backend(spec(kind=Kind.NATIVE, transport=None, native="t:N"), "dist-t", "1.0"))
    monkeypatch.setattr(registry, "default", lambda: found)
    monkeypatch.setattr(registry, "resolve", lambda path, backend: cls)
    problems = Package("t").problems()
    assert len(problems) == len(says)
    for problem, text in zip(problems, says, strict=True):
        assert text in problem


@mapping_only
class MappingChecks:
    def test_any(self):
        pass


def test_a_check_of_maps_is_one_of_transports():
    engine = spec(kind=Kind.ENGINE, transport=None, worker="t:W", trainer="t:T")
    assert why_not(MappingChecks.test_any, engine) == "for backends of kind transport only"
    assert is_of_mapping(MappingChecks.test_any)
    assert not is_of_mapping(TransportChecks.test_any)


def test_a_transport_that_does_not_map_is_not_held_to_maps(tmp_path):
    done = run_kit(
        tmp_path,
        DERIVED.format(backend="echo"),
        "-k=test_a_map_is_had_again",
        "--wt-report=out.json",
    )
    assert done.returncode == 0, done.stdout
    [reason] = json.loads((tmp_path / "out.json").read_text())["reasons"].values()
    assert reason == "its properties.maps is false: readers do not map an owner's memory"


@pytest.mark.parametrize("form", ["private", "shared", "allocated", "views"])
def test_memory_of_each_form_is_zeros_apart_from_each_other(form):
    def allocate(nbytes, device):
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    made = zeros(form, [5, 1, 4096], torch.device("cpu"), allocate)
    assert [list(tensor.shape) for tensor in made] == [[5], [1], [4096]]
    made[1].fill_(7)
    assert [int(tensor.sum()) for tensor in made] == [0, 7, 0]
    assert [tensor.is_shared() for tensor in made] == [form == "shared"] * 3


def test_known_failures_are_read(tmp_path):
    path = tmp_path / "known"
    path.write_text(f"# for now\n\n{LIGHT}  # torch is slow # to import\n")
    assert read_known_failures(path) == {LIGHT: "torch is slow # to import"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("test_no_such_check  # why", r":1: 'test_no_such_check' is no check of the kit"),
        ("\nbackend  # why", r":2: 'backend' is no check of the kit"),
        (f"{LIGHT}", r"has no reason; write one after a #"),
        (f"{LIGHT} # a\n{LIGHT} # b", r":2: .* is there twice"),
        (None, "No such file"),
    ],
)
def test_a_list_of_known_failures_that_is_wrong(tmp_path, text, said):
    path = tmp_path / "known"
    if text is not None:
        path.write_text(text)
    with pytest.raises(pytest.UsageError, match=said):
        read_known_failures(path)


class Phase:
    def __init__(self, when, outcome, longrepr=None, wasxfail=None):
        self.when, self.outcome, self.longrepr, self.duration = when, outcome, longrepr, 0.5
        if wasxfail is not None:
            self.wasxfail = wasxfail


def test_the_report_counts_what_came_out():
    installed = Backend(
        spec(
            capabilities={Capability.CPU, Capability.MULTI_HOST},
            unsupported={Capability.CUDA: "host memory only"},
        ),
        "dist-t",
        "1.2",
    )
    report = Report(installed, "cpu")
    for when in ("setup", "call", "teardown"):
        report.add("good", Phase(when, "passed"))
    report.add("bad", Phase("call", "failed"))
    report.add("bad", Phase("teardown", "passed"))
    report.add("torn_down_badly", Phase("call", "passed"))
    report.add("torn_down_badly", Phase("teardown", "failed"))
    report.add("known", Phase("call", "skipped", wasxfail="reason: slow"))
    report.add("left_out", Phase("setup", "skipped", ("file", 1, "Skipped: not claimed")))
    facts = report.facts()
    assert facts["checks"] == {
        "bad": "failed",
        "good": "passed",
        "known": "known failure",
        "left_out": "not run",
        "torn_down_badly": "failed",
    }
    counts = [facts[n] for n in ("claimed", "passed", "failed", "known_failures", "not_run")]
    assert counts == [2, 1, 2, 1, 1]
    assert facts["reasons"] == {"known": "slow", "left_out": "not claimed"}
    assert facts["capabilities"] == {
        "cpu": "claimed",
        "cuda": "unsupported: host memory only",
        "multi-host": "claimed, not checked: the kit has one host",
        "zero-copy": "undeclared",
        "many-readers": "undeclared",
        "many-owners": "undeclared",
    }
    text = "\n".join(report.lines())
    assert "t (dist-t 1.2, transport) on cpu, by the kit of vllm-wt" in text
    assert "capabilities: claimed 2 of 6" in text
    assert "  known failure: known: slow" in text
    assert "  not run: left_out: not claimed" in text
    json.dumps(facts)


def test_the_report_names_the_transport():
    report = Report(Backend(spec(), "dist-t", "1.2"), "cpu", "second")
    assert report.facts()["transport"] == "second"
    assert "t (dist-t 1.2, transport second) on cpu" in "\n".join(report.lines())


@pytest.mark.parametrize("option", ["--wt-transport=second", "--wt-transport="])
def test_the_option_is_for_the_backend_of_the_command_line(option):
    config = pytest.Config.fromdictargs({}, ["-p", "vllm_wt.testing.plugin", option])
    first = type("First", (BackendConformance,), {"backend": "t", "transport": "first"})
    given = option.partition("=")[2]
    assert transport_of(first, config) == "first"
    assert transport_of(BackendConformance, config) == given


def run_kit(folder, source, *options, plugin=True):
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    if plugin:
        command += ["-p", "vllm_wt.testing.plugin"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


DERIVED = """
from vllm_wt.testing.conformance import BackendConformance

class TestIt(BackendConformance):
    backend = {backend!r}
"""


def test_a_known_failure_that_passes_fails_the_run(tmp_path):
    (tmp_path / "known").write_text(f"{LIGHT}  # it was slow once\n")
    done = run_kit(
        tmp_path,
        DERIVED.format(backend="echo"),
        f"-k={LIGHT}",
        "--wt-known-failures=known",
        "--wt-report=out.json",
    )
    assert done.returncode == 1
    assert "[XPASS(strict)] it was slow once" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["checks"] == {LIGHT: "failed"}


def test_a_typo_is_an_error_of_usage(tmp_path):
    (tmp_path / "known").write_text("test_typo  # why\n")
    done = run_kit(tmp_path, DERIVED.format(backend="echo"), "--wt-known-failures=known")
    assert done.returncode == 4
    assert "'test_typo' is no check of the kit" in done.stderr


def test_without_a_name_or_the_plugin_every_check_says_what_is_missing(tmp_path):
    done = run_kit(tmp_path, DERIVED.format(backend=None), f"-k={LIGHT}", plugin=False)
    assert done.returncode == 1
    assert "set TestIt.backend to the name of the backend" in done.stdout


def test_check_of_a_backend_that_is_not_there(capsys):
    assert main(["check", "no_such_backend"]) == 1
    assert "There is no backend 'no_such_backend'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def forker():
    with Forker() as forker:
        yield forker


def make_endpoint(forker, *, serve):
    return Process(
        forker,
        "endpoint",
        "the endpoint",
        Deadline(60),
        backend="echo",
        name="kit-endpoint",
        device="cpu",
        serve=serve,
    )


@pytest.fixture
def endpoint(forker):
    process = make_endpoint(forker, serve=False)
    yield process
    process.end()


def test_a_call_that_does_not_return_is_a_hang_and_says_where(endpoint):
    endpoint.ready()
    endpoint.stop()
    with pytest.raises(Hang, match=r"the endpoint: `resources` has not returned within 0\.2 s"):
        endpoint.resources(within=0.2)
    with pytest.raises(Ended):
        endpoint.resources()


def test_a_process_that_ends_within_a_call_is_told(endpoint):
    endpoint.ready()
    endpoint.kill()
    with pytest.raises(Ended, match="the endpoint has ended within `resources`"):
        endpoint.resources()


def test_an_error_that_is_not_typed_is_told_with_its_traceback(endpoint):
    with pytest.raises(Untyped, match="KeyError: 'nothing'"):
        endpoint.unregister("nothing")


def test_a_typed_error_crosses_as_its_class(forker):
    trainer = Process(
        forker,
        "trainer",
        "the trainer",
        Deadline(60),
        backend="echo",
        device="cpu",
        kind="few",
        seed=1,
        options={"no_such_option": 1},
        in_place=False,
    )
    with pytest.raises(InvalidInfo, match="no_such_option"):
        trainer.ready()
    trainer.end()


def test_a_report_that_cannot_be_written_is_told_before_the_run(tmp_path):
    done = run_kit(tmp_path, DERIVED.format(backend="echo"), "--wt-report=none/out.json")
    assert done.returncode == 4
    assert "the report cannot be written" in done.stderr


def test_an_earlier_report_is_not_taken_for_this_run_s(tmp_path):
    (tmp_path / "out.json").write_text("{}")
    run_kit(tmp_path, DERIVED.format(backend="echo"), "-k=no_such_check", "--wt-report=out.json")
    assert (tmp_path / "out.json").read_text() == ""


def test_a_backend_that_is_not_installed_is_told_once(tmp_path):
    done = run_kit(tmp_path, DERIVED.format(backend="ecco"))
    assert done.returncode == 4
    assert "did you mean 'echo'?" in done.stderr


def test_a_transport_that_is_not_there_is_told_once(tmp_path, capsys):
    options = ["--wt-backend=echo", "--wt-transport=smoke"]
    done = run_kit(tmp_path, DERIVED.format(backend=None), *options)
    assert done.returncode == 4
    assert "Backend 'echo' has no such transport" in done.stderr
    assert main(["check", "echo", "--transport", "smoke"]) == 1
    assert "Backend 'echo' has no such transport" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda", "foo", "meta"])
def test_a_device_that_cannot_be_used(device, capsys):
    assert main(["check", "echo", "--device", device]) == 1
    assert f"cannot run on device '{device}'" in capsys.readouterr().err


def test_an_interrupted_check_leaves_no_process(tmp_path):
    """At the end of its input the forker goes, and takes even stopped processes with it."""
    forker = Forker()
    process = make_endpoint(forker, serve=True)
    process.ready()
    process.stop()
    forker.close()
    with pytest.raises(Ended):
        process.resources()
    process.end()


def test_the_folder_that_it_is_called_in_changes_nothing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('the wrong one')")
    (tmp_path / "conftest.py").write_text("raise ImportError('of another project')")
    done = subprocess.run(
        [Path(sys.executable).with_name("vllm-wt"), "check", "echo", f"-k={LIGHT}"],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_ADDOPTS": "--collect-only", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checks: 1 passed, 0 failed, 0 known failures, 0 not run, " in done.stdout


def test_the_kit_is_not_loaded_into_every_pytest_session():
    assert not [p for p in metadata.entry_points(group="pytest11") if "vllm_wt" in p.value]


def test_a_check_needs_nothing_but_a_harness():
    for name in dir(BackendConformance):
        if name.startswith("test_"):
            parameters = inspect.signature(getattr(BackendConformance, name)).parameters
            assert list(parameters) == ["self", "harness"], name
