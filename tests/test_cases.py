"""Reported failures (docs/cases.md) that need no vLLM engine.

The worker is a round over the real rdma transport, in this process, into a model that is a dictionary;
those that need a real engine are in tests/e2e/test_cases.py, those on a GPU in tests/gpu/test_cases.py.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from wt_cases import Worker, assert_arrived, bytes_of

from vllm_wt import WeightSync
from vllm_wt.clients.relay import RelayClient
from vllm_wt.deadline import Deadline
from vllm_wt.errors import (
    Aborted,
    CorruptTransfer,
    ManifestMismatch,
    PeerDead,
    Timeout,
    TransportError,
    WeightTransferError,
    WrongOrder,
)
from vllm_wt.manifest import ITEMSIZE, TensorMeta
from vllm_wt.packing import DTYPES
from vllm_wt.transport import Progress
from vllm_wt_rdma.endpoint import Endpoint
from vllm_wt_rdma.transport import NixlTransport

ROOT = Path(__file__).parents[1]
SENTINEL = 0xA5


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.round.shutdown()


@pytest.fixture
def connect(worker):
    """A session between a source and the worker, or another engine."""
    opened = []

    def connect(source, engine=None, **options):
        sync = WeightSync.connect(engine or worker, backend="rdma", source=source, **options)
        opened.append(sync)
        return sync

    yield connect
    for sync in opened:
        sync.close()


def random_bytes(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of any bits, NaNs and all; bool only of those that it has."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = ITEMSIZE[str(dtype).removeprefix("torch.")]
    flat = torch.randint(
        0, 256, (torch.Size(shape).numel() * size,), dtype=torch.uint8, generator=generator
    )
    return flat.view(dtype).view(shape)


# B01: success is answered, but no bytes have moved


def test_B01_what_is_loaded_is_what_was_sent(connect, worker):
    """A check that outputs change would pass on garbage; bytes do not."""
    kept = {"a": torch.empty(1000), "b": torch.empty(77, dtype=torch.bfloat16)}
    states = [
        {"a": torch.rand(1000) + step, "b": torch.rand(77).bfloat16() + step} for step in (1, 2)
    ]
    sync = connect(kept)
    arena = worker.engine._arena._buffer
    paddings = (arena[4000:4096], arena[4096 + 154 :])  # behind each: zeros, which digests take in
    for version, values in enumerate([states[0], states[1], states[0]], start=1):
        for name, tensor in values.items():
            kept[name].copy_(tensor)
        arena.fill_(SENTINEL)
        for padding in paddings:
            padding.zero_()
        result = sync.push(version)
        assert_arrived(worker, values)
        assert result.nbytes == sum(t.numel() * t.element_size() for t in values.values()) == 4154
        assert worker.engine._arena._buffer is arena
        for padding in paddings:  # nothing but the payload was written
            assert not any(bytes_of(padding))


class _SaysDone(NixlTransport):
    """A stand-in for a fabric that has switched itself off: reads do nothing and succeed."""

    def poll(self, operation):
        return Progress(True, 0)


def test_B01_a_fabric_that_reads_nothing_and_says_done_is_caught(connect):
    off = Worker(transport_cls=_SaysDone)
    try:
        sync = connect({"a": torch.ones(1000)}, off)
        with pytest.raises(CorruptTransfer, match="4000"):
            sync.push(1)
        assert off.received == {}
    finally:
        off.round.shutdown()


def test_B01_a_fabric_that_is_off_fails_at_connect(tmp_path):
    """NIXL finds no plug-in that moves anything."""
    code = (
        "import torch; from vllm_wt import WeightSync; from wt_cases import Worker\n"
        "WeightSync.connect(Worker(), backend='rdma', source={'a': torch.ones(3)})"
    )
    done = _python(code, NIXL_PLUGIN_DIR=str(tmp_path))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("vllm_wt.errors.")
    assert "Backend: rdma. Where: start." in last
    assert "No plugins available for NIXL" in last


# B04: the source's tensors are not contiguous


def test_B04_strided_sources(connect, worker):
    base = torch.arange(60, dtype=torch.float32).view(10, 6)
    whole = {name: base.clone() for name in ("transposed", "every_second", "rows", "expanded")}
    source = {
        "transposed": whole["transposed"].t(),
        "every_second": whole["every_second"][:, ::2],
        "rows": whole["rows"][3:7],
        "expanded": whole["expanded"][2].expand(4, 6),
    }
    forms = {name: (t.shape, t.stride(), t.storage_offset()) for name, t in source.items()}
    sync = connect(source)
    for version in (1, 2):
        for tensor in whole.values():
            tensor.add_(100 * version)
        before = {name: bytes_of(tensor) for name, tensor in whole.items()}
        sync.push(version)
        # Written out: an oracle that shares no code with what makes the copies.
        step = {1: 100.0, 2: 300.0}[version]
        want = {
            "transposed": [[6.0 * i + j + step for i in range(10)] for j in range(6)],
            "every_second": [[6.0 * i + j + step for j in (0, 2, 4)] for i in range(10)],
            "rows": [[6.0 * i + j + step for j in range(6)] for i in range(3, 7)],
            "expanded": [[12.0 + j + step for j in range(6)]] * 4,
        }
        assert {name: tensor.tolist() for name, tensor in worker.received.items()} == want
        assert {name: bytes_of(tensor) for name, tensor in whole.items()} == before
        after = {name: (t.shape, t.stride(), t.storage_offset()) for name, t in source.items()}
        assert after == forms


# B12: data of a peer is unpickled

_LOADERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "jsonpickle",
}
_EXECUTES = {"eval", "exec", "__import__", "compile"}


def _unsafe(source: str) -> list[str]:
    """What in a module could run what a peer has sent."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in _LOADERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _LOADERS:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in _EXECUTES or called == "torch.load" or called.endswith(".reductions"):
                found.append(called)
    return found


def test_B12_nothing_of_ours_can_unpickle():
    files = [
        p for part in ("core", "plugins", "examples") for p in (ROOT / part).glob("**/src/**/*.py")
    ]
    assert len(files) > 50
    files.remove(ROOT / "core/src/vllm_wt/testing/unpickling.py")  # watches for it
    # Drives vLLM's own ipc, which takes nothing but pickles.
    files.remove(ROOT / "core/src/vllm_wt/cli/bench_round_builtin.py")
    assert {str(p): found for p in files if (found := _unsafe(p.read_text()))} == {}
    seen = "import pickle\nfrom dill import loads\ntorch.load(f)\neval(x)"
    assert _unsafe(seen) == ["pickle", "dill", "torch.load", "eval"]


# B14: an offset that a wider dtype cannot have


@pytest.mark.parametrize(
    "forms",
    [
        [(torch.float16, 3), (torch.float32, 5)],
        [(torch.uint8, 1), (torch.float32, 2)],
        [(torch.float8_e4m3fn, 7), (torch.bfloat16, 3)],
        [(torch.bool, 3), (torch.int64, 2)],
        [(torch.uint8, 1), (torch.complex128, 1), (torch.int16, 5)],
    ],
    ids=lambda forms: "+".join(str(dtype).removeprefix("torch.") for dtype, _ in forms),
)
def test_B14_odd_lengths_before_wider_dtypes(connect, worker, forms):
    tensors = [random_bytes(dtype, count, seed=i) for i, (dtype, count) in enumerate(forms)]
    source = {str(number): tensor for number, tensor in enumerate(tensors)}
    # In the trainer's memory too: nothing says that a fabric's source is aligned.
    odd = torch.arange(10, dtype=torch.uint8)[1:6]
    for order in itertools.permutations(source):
        sent = {name: source[name] for name in order} | {"odd": odd}
        connect(sent).push(1)
        assert_arrived(worker, sent)
        for name, place in worker.model.places.items():
            assert place % sent[name].element_size() == 0, name
        arena = worker.engine._arena._buffer
        assert all(0 <= p - arena.data_ptr() < len(arena) for p in worker.model.places.values())


# B16: tensors of no bytes


@pytest.mark.parametrize("where", ["first", "middle", "last", "everywhere", "all"])
def test_B16_empty_tensors(connect, worker, where):
    empty, full = (
        {"e0": torch.empty(0), "e1": torch.empty(0, 128)},
        {
            "f0": torch.rand(5),
            "f1": torch.rand(3, 2),
        },
    )
    first, second = ({name: tensor} for name, tensor in full.items())
    source = {
        "first": empty | full,
        "middle": first | empty | second,
        "last": full | empty,
        "everywhere": {"e2": torch.empty(3, 0)} | first | empty | second | {"e3": torch.empty(0)},
        "all": empty,
    }[where]
    sync = connect(source)
    for version in (1, 2):
        for tensor in full.values():
            tensor.mul_(2)
        result = sync.push(version)
        assert_arrived(worker, source)
        assert result.tensors == len(source)
        assert result.nbytes == (0 if where == "all" else 44)
    # They are checked like any other.
    source["e1"] = torch.empty(0, 127)
    with pytest.raises(ManifestMismatch, match=re.escape("e1 float32 [0, 127]")):
        sync.push(3)


# B17: dtypes that a fabric has no name for


def test_B17_every_dtype_bit_for_bit(connect, worker):
    assert {"bool", "int16", "uint16", "float8_e4m3fnuz", "float8_e8m0fnu", "complex64"} <= set(
        DTYPES
    )
    # Only bytes move, so none that torch has may be missing, but those that hold no plain bytes.
    ours = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    left_out = {str(d).removeprefix("torch.") for d in ours - set(DTYPES.values())}
    assert [
        n for n in left_out if not n.startswith(("q", "int", "uint", "bits", "complex32"))
    ] == []
    source = {name: random_bytes(dtype, 3, 6, seed=9) for name, dtype in DTYPES.items()}
    sync = connect(source)
    for version in (1, 2):
        for name, dtype in DTYPES.items():
            source[name].view(torch.uint8).copy_(
                random_bytes(dtype, 3, 6, seed=version).view(torch.uint8)
            )
        sync.push(version)
        assert_arrived(worker, source)


@pytest.mark.parametrize("name", ["torch.float32", "load", "__class__", "float31", ""])
def test_B17_a_dtype_is_looked_up_and_never_evaluated(connect, worker, name):
    sync = connect({"a": torch.ones(2)})
    info = sync._trainer.describe(Deadline(30)).to_wire()
    info["tensors"][0]["dtype"] = name
    with pytest.raises(RuntimeError, match="has a dtype that cannot be sent") as refused:
        worker.init_weight_transfer_engine(info)
    assert f"Got: {name}" in str(refused.value)
    with pytest.raises(ManifestMismatch, match="float32"):
        TensorMeta("a", name, (2,))
    sync.push(1)
    assert_arrived(worker, {"a": torch.ones(2)})


# B24: what a worker answers is not looked at


@pytest.mark.parametrize("phase", ["start", "open", "seal", "finish"])
def test_B24_a_failure_that_an_engine_keeps_to_itself(connect, worker, phase):
    """A stand-in for an engine that answers False or None where a worker has failed."""
    sync = connect({"a": torch.ones(1000)})
    sync.push(1)
    step = {
        "start": (worker.engine, "start_weight_update"),
        "open": (worker.round, "_open"),
        "seal": (worker.round, "_seal"),
        "finish": (worker.model, "apply"),
    }[phase]
    original = getattr(*step)

    def failing(*args):
        setattr(*step, original)
        raise TransportError("injected by the test")

    setattr(*step, failing)
    worker.answers_false_for = phase
    before = worker.received
    with pytest.raises(WeightTransferError) as error:
        sync.push(2, deadline_s=30)
    assert type(error.value) is not Timeout
    assert worker.received is before
    worker.answers_false_for = None
    assert sync.status()[0].torn == (phase == "finish")
    sync.push(3)
    assert [s.version for s in sync.status()] == [3]


# B30: another path is taken without a word


class _Refuses:
    """NIXL's agent, whose registration fails: real memory that cannot be pinned is hard to come by."""

    def __init__(self, agent):
        self._agent = agent

    def __getattr__(self, name):
        return getattr(self._agent, name)

    def register_memory(self, *args):
        raise OSError("cannot pin")


@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_B30_memory_that_cannot_be_registered_is_an_error(connect, worker, monkeypatch, side):
    source = {"a": torch.ones(1000)}
    original = Endpoint.__init__

    def made(self, name):
        original(self, name)
        if side in name:
            self._agent = _Refuses(self._agent)

    with monkeypatch.context() as patch:
        patch.setattr(Endpoint, "__init__", made)
        with pytest.raises(TransportError, match="cannot pin") as error:
            connect(source)
    assert (error.value.backend, error.value.where) == ("rdma", "register")
    with pytest.raises(RuntimeError, match="before init_weight_transfer_engine"):
        worker.start_weight_update()
    assert worker.received == {}
    connect(source).push(1)
    assert_arrived(worker, source)


def test_B30_memory_that_moved_and_cannot_be_registered(connect, worker):
    """Best effort would leave the worker reading what lay there before."""
    source = {"a": torch.ones(1000)}
    sync = connect(source)
    sync.push(1)
    before, endpoint = worker.received, sync._trainer._transport._endpoint
    agent, endpoint._agent = endpoint._agent, _Refuses(endpoint._agent)
    source["a"] = torch.full((1000,), 2.0)
    for version in (2, 3):
        with pytest.raises(TransportError, match="cannot pin"):
            sync.push(version)
        assert worker.received is before
    endpoint._agent = agent
    sync.push(4)
    assert_arrived(worker, source)


# B31: what was learnt of a peer before it registered anew, or was started again


def test_B31_a_handle_from_before_a_registration(connect, worker):
    source = {"a": torch.ones(1000)}
    sync = connect(source)
    sync.push(1)
    stale = sync._trainer.describe(Deadline(30)).to_wire()
    source["a"] = torch.full((1000,), 2.0)
    sync.push(2)
    assert sync._trainer.generation == stale["handle"]["generation"] + 1
    with pytest.raises(RuntimeError, match="WT-E06"):
        _serving(sync, lambda: worker.init_weight_transfer_engine(stale))
    assert_arrived(worker, source)
    connect(source).push(1)
    assert_arrived(worker, source)


def test_B31_a_handle_of_a_trainer_that_was_started_again(connect, worker):
    source = {"a": torch.ones(1000)}
    first = connect(source)
    first.push(1)
    stale = first._trainer.describe(Deadline(2)).to_wire()
    first.close()
    second = connect(source)  # in the same process, with the same memory
    with pytest.raises(RuntimeError, match="WT-E04"):  # PeerDead: its endpoint has gone with it
        worker.init_weight_transfer_engine(stale | {"takes_over": True})
    with pytest.raises((WrongOrder, Aborted)):
        second.push(1)  # the worker is connected to nobody, and says so
    source["a"].fill_(3.0)
    connect(source).push(1)
    assert_arrived(worker, source)


def test_B31_nothing_is_told_before_it_is_registered():
    owner = NixlTransport("owner", torch.device("cpu"))
    other = NixlTransport("other", torch.device("cpu"))
    try:
        region = other.register([torch.zeros(8, dtype=torch.uint8)])
        with pytest.raises(TransportError, match="not registered with this transport"):
            owner.expose(region, 1)
        other.expose(region, 1)
        other.unregister(region)
        with pytest.raises(TransportError, match="not registered with this transport"):
            other.expose(region, 2)
    finally:
        owner.close()
        other.close()


# B32: NIXL or UCX cannot be made


def test_B32_connect_says_why():
    code = (
        "import torch; from vllm_wt import WeightSync; from wt_cases import Worker\n"
        "WeightSync.connect(Worker(), backend='rdma', source={'a': torch.ones(3)})"
    )
    done = _python(code, UCX_TLS="garbage")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("vllm_wt.errors.TransportError: NIXL's UCX backend refused.")
    assert "Backend: rdma. Where: start." in last
    assert "Cure: see what UCX and NIXL logged" in last


def test_B32_doctor_says_why(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "garbage")
    hidden = (
        "import sys; sys.modules['vllm'] = None; from vllm_wt.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    checks = {check["id"]: check for check in said["checks"]}
    assert (done.returncode, said["ok"]) == (1, False)
    agent = checks["rdma-agent-cpu"]
    assert agent["status"] == "problem"
    assert "UCX: transport 'garbage' is not available" in agent["found"]
    assert agent["cure"].startswith("unset or correct UCX_TLS")


# B35: tensors of no dimension


@pytest.mark.parametrize("where", ["alone", "first", "last", "both"])
def test_B35_scalars(connect, worker, where):
    scalar, more = {"s": torch.tensor(0.25)}, {"w": torch.rand(7, 3)}
    source = {
        "alone": scalar,
        "first": scalar | more,
        "last": more | scalar,
        "both": scalar | more | {"b": torch.tensor(True)},
    }[where]
    sync = connect(source)
    for version in (1, 2):
        scalar["s"].add_(1)
        sync.push(version)
        assert_arrived(worker, source)
        assert worker.received["s"].shape == ()
        assert worker.received["s"].item() == 0.25 + version
    info = sync._trainer.describe(Deadline(30)).to_wire()
    assert [] in [tensor["shape"] for tensor in info["tensors"]]
    source["s"] = torch.tensor([0.25])
    with pytest.raises(ManifestMismatch, match=re.escape("s float32 [1]")):
        sync.push(3)


# B44: what vLLM asks of a plug-in changes from release to release


@pytest.mark.slow
def test_B44_registration_is_lazy_and_fits_the_installed_vllm():
    code = """
import inspect, sys
sys.modules["ray"] = None  # importing it fails
from vllm_wt.bridge import register
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
register(); register()
assert "vllm_wt.bridge.worker" not in sys.modules and "vllm_wt_rdma.transport" not in sys.modules
from vllm.config import WeightTransferConfig
for name in ("rdma", "wt_rdma"):
    config = WeightTransferConfig(backend=name)
    cls = Factory._registry[config.backend]()
    assert cls.__name__ == "WorkerEngine_rdma" and not inspect.isabstract(cls)
# What vLLM's factory passes is what the engine takes.
from vllm.distributed.weight_transfer.base import WeightTransferEngine as Base
takes = list(inspect.signature(cls.__init__).parameters)
assert takes == list(inspect.signature(Base.__init__).parameters), takes
assert "nixl_cu13" not in sys.modules
print("fits")
"""
    done = _python(code)
    assert done.stdout.splitlines()[-1:] == ["fits"], done.stderr


# B55: there is no engine


def test_B55_a_server_that_is_not_there():
    with closing(socket.socket()) as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(PeerDead) as error:
            WeightSync.connect(url, backend="rdma", source={"a": torch.ones(3)})
    assert url in str(error.value)


def test_B55_a_process_that_is_not_there(tmp_path):
    with pytest.raises(PeerDead, match=re.escape(str(tmp_path / "engine.sock"))) as error:
        RelayClient(tmp_path / "engine.sock")
    assert error.value.cure == "start the engine first"


def test_B55_an_engine_that_never_answers(tmp_path):
    """It has bound its socket, and then never reads."""
    path = tmp_path / "engine.sock"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(path))
        listener.listen()
        client = RelayClient(path, timeout_s=0.05)
        with closing(client), pytest.raises(Timeout, match="did not answer") as error:
            client.world_size()
    assert error.value.where == "world_size"
    assert error.value.expected == "within 0.05 s"


# The table


def test_every_case_has_a_test_or_says_what_it_waits_for():
    rows = re.findall(
        r"^\| (B\d\d) \|.*\| ([^|]+) \|$", (ROOT / "docs/cases.md").read_text(), re.MULTILINE
    )
    listed = [case for case, _ in rows]
    assert len(listed) == len(set(listed)) == 42
    there = _tests()
    for case, cell in rows:
        named = re.findall(r"`([\w/.]+)::(\w+)`", cell)
        assert named or cell.startswith("comes with "), case
        for path, name in named:
            assert name.startswith(f"test_{case}_"), case
            assert (path, name) in there, case
    named = set(re.findall(r"`([\w/.]+)::(\w+)`", " ".join(cell for _, cell in rows)))
    assert sorted(there - named) == []


def _tests() -> set[tuple[str, str]]:
    """The path and the name of every test of a case."""
    return {
        (str(path.relative_to(ROOT)), name)
        for folder in ("core/tests", "plugins", "tests")
        for path in (ROOT / folder).glob("**/test_*.py")
        for name in re.findall(r"^(?:async )?def (test_B\d\d_\w+)", path.read_text(), re.MULTILINE)
    }


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, which has read nothing of UCX's settings yet."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def _serving(sync, call):
    """A call during which the trainer serves its memory, as it does in a round."""
    from vllm_wt.serving import serving

    with serving(sync._trainer):
        return call()
