"""Where a worker receives, and how much memory that takes."""

from __future__ import annotations

import pytest
import torch

from vllm_wt.errors import InvalidInfo, LoadError
from vllm_wt.loading import arena as module
from vllm_wt.loading.arena import RESERVE, Arena

CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free memory by kind of device; to be changed by a test."""
    free = {"cpu": 100 * GIB, "cuda": 100 * GIB}
    monkeypatch.setattr(module, "_free", lambda device: free[device.type])
    return free


@pytest.mark.parametrize("asked", ["device", "host", "none"])
def test_what_is_asked_for_is_done(asked):
    choice = Arena(CPU).choose(asked, 1 << 60, host=True)
    assert (choice.staging, choice.why) == (asked, "asked for")


def test_host_memory_that_the_transport_cannot_receive_into():
    with pytest.raises(InvalidInfo, match="cannot receive into host memory"):
        Arena(CPU).choose("host", 1, host=False)


@pytest.mark.parametrize(
    ("nbytes", "on_device", "on_host", "host", "expected"),
    [
        (2 * GIB, 3 * GIB, 0, True, "device"),
        (2 * GIB + 1, 3 * GIB, 0, True, "none"),
        (2 * GIB + 1, 3 * GIB, 4 * GIB, True, "host"),
        (2 * GIB + 1, 3 * GIB, 4 * GIB, False, "none"),
        (2 * GIB + 1, 3 * GIB, 3 * GIB, True, "none"),
    ],
)
def test_auto_takes_the_first_that_there_is_memory_for(
    free, nbytes, on_device, on_host, host, expected
):
    free["cuda"], free["cpu"] = on_device, on_host
    choice = Arena(torch.device("cuda")).choose("auto", nbytes, host=host)
    assert choice.staging == expected
    assert "MiB" in choice.why


def test_memory_that_is_held_already_counts(free):
    arena = Arena(CPU)
    held = arena.take(4096, "device")
    free["cpu"] = 0
    assert arena.choose("auto", 4096, host=True).staging == "device"
    assert arena.choose("auto", 4097, host=True).staging == "none"
    assert arena.take(4096, "device").data_ptr() == held.data_ptr()


def test_the_same_memory_is_used_again_and_is_zero(free):
    arena = Arena(CPU)
    first = arena.take(10_000, "device").fill_(7)
    again = arena.take(5_000, "device")
    assert again.data_ptr() == first.data_ptr()
    assert not again.any()
    assert arena.nbytes == 10_000
    larger = arena.take(20_000, "host")
    assert (larger.numel(), arena.nbytes) == (20_000, 20_000)
    arena.abandon()
    assert arena.nbytes == 0
    assert arena.take(20_000, "device").data_ptr() != larger.data_ptr()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("", 0), ("0", 0), ("5000", 5000), ("3KiB", 3072), (" 2 MiB ", 2 << 20), ("1kb", 1000)],
)
def test_memory_can_be_reserved(monkeypatch, text, nbytes):
    monkeypatch.setenv(RESERVE, text)
    assert Arena(CPU).nbytes == nbytes


@pytest.mark.parametrize("text", ["much", "1.5GiB", "-1", "3 XB", "GiB", "9" * 30, "1024TiB"])
def test_what_is_no_size(monkeypatch, text):
    monkeypatch.setenv(RESERVE, text)
    with pytest.raises(InvalidInfo) as error:
        Arena(CPU)
    assert (error.value.where, error.value.got) == (RESERVE, repr(text))


def test_memory_that_there_is_not(monkeypatch):
    monkeypatch.setenv(RESERVE, "900TiB")
    with pytest.raises(LoadError, match="no memory to receive into") as error:
        Arena(CPU)
    assert "VLLM_WT_ARENA" in error.value.cure


def test_free_memory_is_looked_up():
    assert 0 < module._free(CPU) < 1 << 50
