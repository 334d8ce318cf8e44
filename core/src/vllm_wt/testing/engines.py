"""Starting real vLLM engines that are small enough for a laptop, in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_wt.bridge.register import name_in_vllm


def start_llm(model: Path, dtype: str, backend: str, *, tp: int = 1, **overrides: Any) -> Any:
    """A ``vllm.LLM`` on a checkpoint, ready for weight transfer.

    Args:
        model: The checkpoint's folder.
        dtype: Its dtype by torch's name; vLLM would turn float32 into bfloat16 unasked.
        backend: Name of an installed backend.
        tp: Tensor-parallel size. On a CPU each worker gets a core.
        overrides: Further arguments of ``LLM``.
    """
    arguments = _arguments(model, dtype, backend, tp)
    from vllm import LLM

    return LLM(**(arguments | overrides))


def start_async_llm(model: Path, dtype: str, backend: str, *, tp: int = 1, **overrides: Any) -> Any:
    """:func:`start_llm` of a ``vllm.AsyncLLM``, on the running event loop."""
    arguments = _arguments(model, dtype, backend, tp)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**(arguments | overrides)))


def greedy_tokens(llm: Any, prompt_ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations by the engine, one request at a time so that batching cannot differ."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    outputs = []
    for ids in prompt_ids:
        (request,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        outputs.append([int(token) for token in request.outputs[0].token_ids])
    return outputs


def _arguments(model: Path, dtype: str, backend: str, tp: int) -> dict[str, Any]:
    """Settings of an engine in this process, whose environment is made ready first."""
    for name, value in environment(tp).items():
        os.environ.setdefault(name, value)
    from vllm.config import WeightTransferConfig

    given = settings(model, dtype, name_in_vllm(backend), tp)
    return given | {
        "weight_transfer_config": WeightTransferConfig(**given["weight_transfer_config"])
    }


def settings(model: Path, dtype: str, name: str, tp: int) -> dict[str, Any]:
    """What makes an engine small, by the names of ``LLM``'s arguments."""
    small: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "use_tqdm_on_load": False,
        "tensor_parallel_size": tp,
        "weight_transfer_config": {"backend": name},
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": True,
    }
    if _cuda():
        # One that takes float32 too: engines are comparable within one attention backend only.
        small["attention_config"] = {"backend": "TRITON_ATTN"}
    return small


def environment(tp: int) -> dict[str, str]:
    """What an engine's process needs unless told otherwise."""
    if _cuda():
        return {
            # The question has started CUDA here, which a forked worker could not use.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # Triton rounds float32 to tf32 unless told not to; greedy tokens would differ from a
            # reference's.
            "TRITON_F32_DEFAULT": "ieee",
        }
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp))}


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
