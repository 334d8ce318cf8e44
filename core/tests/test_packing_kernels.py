"""The kernel for GPUs, without one: what it copies when interpreted, what it is compiled to."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

KERNEL = """
import random, sys, torch
from vllm_wt.packing import kernels
from vllm_wt.packing.host import Run

kernels._TILE, kernels._BYTE_TILE, kernels._BLOCK = 4096, 512, 128
random.seed(0)
source = torch.randint(0, 256, (400_000,), dtype=torch.uint8)
to = torch.full((400_000,), 0xA5, dtype=torch.uint8)
wanted = to.clone()
runs, at = [], 16
for size in [1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 511, 4095, 4096, 4097, 9999]:
    for shift in [(0, 0), (0, 1), (1, 0), (3, 3), (8, 0), (15, 15), (5, 9)]:
        a, b = at + shift[0], at + shift[1]
        runs.append(Run(to.data_ptr() + a, source.data_ptr() + b, size))
        wanted[a : a + size] = source[b : b + size]
        at += -(-(size + 48) // 16) * 16
assert at < len(to)
copies = kernels.DeviceCopies(runs, torch.device("cpu"))
assert [wide for _, wide in copies._tables] == [True, False]
wide, narrow = (table for table, _ in copies._tables)
assert not (wide[:, :2] % 16).any()  # which only a GPU minds
assert (wide[:, 2].max(), narrow[:, 2].max()) == (4096, 512)
copies.run()
assert torch.equal(to, wanted)
source.random_(0, 256)
kernels.DeviceCopies([], torch.device("cpu")).run()
copies.run()
assert not torch.equal(to, wanted)
print("the same")
"""


def test_copies_bytes_of_every_size_and_place():
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr


@pytest.mark.parametrize(
    ("wide", "moves"),
    [
        (True, {"ld.global.v2.b64", "st.global.v2.b64", "ld.global.b8", "st.global.b8"}),
        (False, {"ld.global.b8", "st.global.b8"}),
    ],
)
def test_compiles_to_loads_of_16_bytes_where_it_can(wide, moves, monkeypatch, tmp_path):
    """The interpreter takes Python that the compiler does not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_wt.packing import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = ASTSource(
        kernels._copy_tiles,
        {"table": "*i64", "wide": "constexpr", "block": "constexpr"},
        {"wide": wide, "block": kernels._BLOCK},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels._WARPS}
    )
    found = {word.rstrip() for word in compiled.asm["ptx"].split() if ".global." in word}
    assert found - {"ld.global.b64"} == moves  # that one reads the table
