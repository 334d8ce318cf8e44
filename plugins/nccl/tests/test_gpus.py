"""Ranks that NCCL could not connect are told so before it is asked."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from vllm_wt.deadline import Deadline
from vllm_wt.errors import InvalidInfo, Timeout
from vllm_wt_nccl.gpus import Gpu, exchanged, require_apart, require_one_library


def gpu(**other: Any) -> Gpu:
    return Gpu(**{"host": "h", "uuid": "GPU-1", "pid": 7, "library": "2.28.9"} | other)


def test_each_learns_of_all_in_order() -> None:
    store, gpus = HashStore(), [gpu(pid=pid) for pid in (10, 11, 12)]
    seen: dict[int, list[Gpu]] = {}

    def come(rank: int) -> None:
        seen[rank] = exchanged(store, rank, 3, gpus[rank], Deadline(30))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {0: gpus, 1: gpus, 2: gpus}


def test_one_that_does_not_come() -> None:
    with pytest.raises(Timeout, match="rank 0 of 2") as caught:
        exchanged(HashStore(), 0, 2, gpu(), Deadline(0.05))
    assert caught.value.got == "none that is rank 1"


@pytest.mark.parametrize("said", ["", "[]", '{"host": "h"}', "\x00"])
def test_what_is_no_gpu(said: str) -> None:
    store = HashStore()
    store.set("gpu/1", said)
    with pytest.raises(InvalidInfo):
        exchanged(store, 0, 2, gpu(), Deadline(30))


def test_B48_two_on_one_gpu_are_refused() -> None:
    with pytest.raises(InvalidInfo) as caught:
        require_apart([gpu(pid=1), gpu(uuid="GPU-2", pid=2), gpu(pid=3)])
    assert "ranks 0 (pid 1) and 2 (pid 3) on GPU GPU-1" in str(caught.value)
    assert "ipc" in str(caught.value.cure)


def test_gpus_that_are_apart() -> None:
    require_apart([gpu(), gpu(uuid="GPU-2"), gpu(host="other")])


def test_releases_that_differ_are_refused() -> None:
    with pytest.raises(InvalidInfo) as caught:
        require_one_library([gpu(), gpu(library="2.30.4", pid=9)])
    assert (caught.value.expected, caught.value.got) == ("NCCL 2.28.9, as rank 0", "NCCL 2.30.4")
