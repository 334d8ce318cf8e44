"""begin, send and end over the real rdma backend, to a worker in this process."""

from __future__ import annotations

import pytest
import torch
from wt_cases import Worker, assert_arrived
from wt_ring import full_tensors

from vllm_wt import WeightSync
from vllm_wt.errors import ManifestMismatch
from vllm_wt.source import Announced

pytestmark = pytest.mark.xdist_group("ring")


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.round.shutdown()


def test_tensors_that_the_trainer_makes_in_one_buffer(worker):
    """Each overwrites the one before, as a trainer that converts its weights one by one does."""
    shapes = full_tensors("small", 0)
    with WeightSync.connect(
        worker, backend="rdma", source=Announced(shapes), bucket_nbytes=8192
    ) as sync:
        buffer = torch.empty(max(tensor.nbytes for tensor in shapes.values()), dtype=torch.uint8)
        for version in (1, 2, 3):
            sync.begin(version)
            for name, tensor in full_tensors("small", version).items():
                made = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                made.copy_(tensor)
                sync.send({name: made})
                buffer.fill_(0xA5)
            sync.end()
            assert_arrived(worker, full_tensors("small", version))
        sync.begin(4)
        with pytest.raises(ManifestMismatch):
            sync.send([("w1", torch.ones(7).bfloat16())])
        assert_arrived(worker, full_tensors("small", 3))
        sync.begin(4)
        sync.send(full_tensors("small", 4).items())
        sync.end()
        assert_arrived(worker, full_tensors("small", 4))
