"""GPUs by UUID."""

from __future__ import annotations

import uuid

import pytest

from vllm_wt.errors import TransportError
from vllm_wt_ipc import devices

PLAIN = "d78e3ceaa8142c5642f34ff7810337c8"
DASHED = "d78e3cea-a814-2c56-42f3-4ff7810337c8"
OTHER = "0" * 32


@pytest.mark.parametrize(
    "spelling",
    [
        PLAIN,
        DASHED,
        DASHED.upper(),
        f"GPU-{DASHED}",
        f"gpu-{PLAIN}",
        f"MIG-{DASHED}",
        f" GPU-{DASHED}\n",
        uuid.UUID(DASHED).bytes,
    ],
)
def test_every_spelling_is_the_same_gpu(spelling: str | bytes) -> None:
    assert devices.normalised(spelling) == PLAIN


def test_instances_of_the_old_form_are_told_apart() -> None:
    first, second = (devices.normalised(f"MIG-GPU-{DASHED}/{n}/0") for n in (1, 2))
    assert first == f"{PLAIN}/1/0"
    assert first != second


@pytest.mark.parametrize("spelling", ["", "0", "cuda:0", "GPU-", f"GPU-{DASHED}0", b"\0" * 15])
def test_what_is_no_uuid_is_refused(spelling: str | bytes) -> None:
    with pytest.raises(TransportError):
        devices.normalised(spelling)


def test_the_same_gpu_is_taken_whatever_its_index() -> None:
    devices.require_same_gpu("owner", PLAIN, 1, {0: OTHER, 1: PLAIN})


def test_another_visible_gpu_is_refused() -> None:
    with pytest.raises(TransportError, match="another GPU") as caught:
        devices.require_same_gpu("owner", PLAIN, 0, {0: OTHER, 1: PLAIN})
    assert DASHED in str(caught.value.expected)
    assert f"0: {uuid.UUID(OTHER)}, 1: {DASHED}" in str(caught.value.got)
    assert "device 1" in str(caught.value.cure)


def test_a_gpu_that_is_not_visible_is_refused() -> None:
    with pytest.raises(TransportError, match="not visible") as caught:
        devices.require_same_gpu("owner", PLAIN, 0, {0: OTHER})
    assert DASHED in str(caught.value.expected)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.cure)
