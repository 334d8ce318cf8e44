"""Methods that tests add to vLLM's workers, through its ``worker_extension_cls``."""

from __future__ import annotations

import hashlib
import itertools
import threading
from typing import Any

import torch

PHASES = ("open", "receive", "seal", "apply")
LAYERS_THAT_LOAD = 3


class FaultExtension:
    """Runs inside a worker, where ``self`` is the worker itself."""

    weight_transfer_engine: Any
    model_runner: Any
    rank: int

    def wt_echo(self, nonce: str) -> list[Any]:
        """The rank's answer to this very call: a late reply of another call has another nonce."""
        return [self.rank, nonce]

    def wt_state(self) -> dict[str, Any]:
        """What the round says of itself, and whether any layer is on meta."""
        round_ = self.weight_transfer_engine.round
        return {
            "state": round_.state.value,
            "torn": round_.torn,
            "version": round_.version,
            "meta": [n for n, p in self.model_runner.get_model().named_parameters() if p.is_meta],
        }

    def wt_receive(self) -> dict[str, Any]:
        """Whether it receives, and the class of what ended the last receive of this round."""
        receive = self.weight_transfer_engine.round._receive
        return {
            "running": receive is not None and receive.running,
            "error": None if receive is None else type(receive.error).__name__,
        }

    def wt_close_gate(self) -> None:
        """vLLM's worker as it comes, without our wrapping."""
        from vllm.v1.worker.gpu_worker import Worker

        for name in ("start_weight_update", "update_weights", "finish_weight_update"):
            setattr(Worker, name, getattr(Worker, name).__wrapped__)
        self._weight_update_active = False

    def wt_memory(self) -> dict[str, Any]:
        """Resident bytes, the arena's address and the number of threads."""
        import psutil

        engine = self.weight_transfer_engine.round._engine
        return {
            "rss": psutil.Process().memory_info().rss,
            "arena": engine._arena._buffer.data_ptr(),
            "transport": id(engine._reading._transport),
            "threads": threading.active_count(),
        }

    def wt_fabric(self) -> str:
        """The class of the Transport that this rank reads through."""
        return type(self.weight_transfer_engine.round._engine._reading._transport).__name__

    def wt_bytes_read(self) -> int:
        """What this rank reads of the trainer's memory in a round."""
        nbytes: int = self.weight_transfer_engine.round._engine._itinerary.nbytes
        return nbytes

    def wt_staging(self) -> dict[str, Any]:
        """Where this rank receives, in how many batches, and into how much memory."""
        engine = self.weight_transfer_engine.round._engine
        return {
            "staging": engine.staging.staging,
            "why": engine.staging.why,
            "batches": [len(batch.names) for batch in engine._itinerary.batches],
            "arena": engine.arena_nbytes,
        }

    def wt_streamed_nbytes(self, nbytes: int) -> None:
        """How much is received at a time where an update is streamed."""
        from vllm_wt.loading import reception

        reception.STREAMED_NBYTES = nbytes  # type: ignore[misc]

    def wt_fail_batch_once(self, number: int, rank: int) -> None:
        """One batch of the next streamed update is not loaded."""
        if self.rank != rank:
            return
        loader = self.weight_transfer_engine.round._loader
        original = loader.apply_batch

        def failing(which: int, weights: Any, **how: Any) -> None:
            if which == number:
                loader.apply_batch = original
                raise RuntimeError("injected into a batch")
            original(which, weights, **how)

        loader.apply_batch = failing

    def wt_resources(self) -> dict[str, int]:
        """Number of the process, resident bytes, threads, file descriptors."""
        return resources()

    def wt_digests(self) -> dict[str, str]:
        """SHA-256 of every parameter and buffer as the kernels use it."""
        model = self.model_runner.get_model()
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {
            name: hashlib.sha256(_bytes_of(tensor)).hexdigest() for name, tensor in tensors.items()
        }

    def wt_addresses(self) -> dict[str, int]:
        """Where every parameter lies: captured CUDA graphs read it there."""
        model = self.model_runner.get_model()
        return {name: param.data_ptr() for name, param in model.named_parameters()}

    def wt_hold_read(self) -> None:
        """The next read waits, chunk after chunk, until it is let go."""
        from vllm_wt.pull.reading import Reading

        original = Reading.make
        self._let_go = threading.Event()

        def held(reading: Any, read: Any, deadline: Any) -> None:
            Reading.make = original
            while not self._let_go.wait(0.01):
                deadline.check("held by the test")
            original(reading, read, deadline)

        Reading.make = held

    def wt_let_go(self) -> None:
        self._let_go.set()

    def wt_fail_once(self, phase: str, rank: int) -> None:
        """Make one step of the next round fail on one rank."""
        if self.rank != rank:
            return
        round_ = self.weight_transfer_engine.round
        if phase == "open":
            _raise_once(round_, "_open")
        elif phase == "receive":
            from vllm_wt.pull.reading import Reading

            _raise_once(Reading, "make")
        elif phase == "seal":
            _drop_one_tensor_once(round_)
        elif phase == "apply":
            _fail_load_halfway_once()
        else:
            raise ValueError(phase)


def resources() -> dict[str, int]:
    """What a process must not have more and more of."""
    import psutil

    process = psutil.Process()
    return {
        "pid": process.pid,
        "rss": process.memory_info().rss,
        "threads": process.num_threads(),
        "fds": process.num_fds(),
    }


def _raise_once(target: Any, name: str) -> None:
    original = getattr(target, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        setattr(target, name, original)
        raise RuntimeError(f"injected into {name}")

    setattr(target, name, failing)


def _drop_one_tensor_once(round_: Any) -> None:
    """The engine says that it has everything, and hands over one tensor too few."""
    engine = round_._engine
    original = engine.receive_weights

    def short(info: Any, load_weights: Any) -> None:
        engine.receive_weights = original
        original(info, lambda weights: load_weights(list(weights)[1:]))

    engine.receive_weights = short


def _fail_load_halfway_once() -> None:
    """Some layers have their new weights, one is armed, the others have the old ones."""
    from vllm.model_executor.model_loader.reload import layerwise

    original = layerwise._layerwise_process
    done = itertools.count()

    def failing(layer: Any, info: Any) -> None:
        if next(done) < LAYERS_THAT_LOAD:
            return original(layer, info)
        layerwise._layerwise_process = original
        raise RuntimeError("injected into the commit")

    layerwise._layerwise_process = failing


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b""
