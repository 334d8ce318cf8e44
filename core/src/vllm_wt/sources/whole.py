"""One value of a source as the full, plain tensor that can be sent."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from vllm_wt.errors import InvalidInfo, TransportError, WeightTransferError
from vllm_wt.sources.gathering import gathered


def is_dtensor(value: Any) -> bool:
    """Whether it is a ``torch.distributed.tensor.DTensor``; never imports that module.

    Its import takes half a second, and nobody has a DTensor who hasn't paid for it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    cls = getattr(module, "DTensor", None)
    return cls is not None and isinstance(value, cls)


def require_sendable(name: Any, value: Any, *, where: str) -> None:
    """Refuse what isn't a name and a tensor with values of its own.

    Raises:
        InvalidInfo: ``name`` is no string; ``value`` is no tensor, a FlatParameter of FSDP1, a lazy
            or meta tensor, sparse, quantised, or of a class that keeps its values elsewhere.
    """
    if not isinstance(name, str):
        raise InvalidInfo(
            f"The key {name!r} is not a name",
            where=where,
            expected="str: the tensor's name in the checkpoint",
            got=type(name).__name__,
            cure="use the checkpoint's names as keys",
        )
    if not isinstance(value, torch.Tensor):
        raise _refused(
            name,
            "is not a tensor",
            where=where,
            expected="a torch.Tensor",
            got=f"{type(value).__module__}.{type(value).__qualname__}",
            cure="leave it out, or make it a tensor with torch.as_tensor",
        )
    if is_lazy(value):
        raise _refused(
            name,
            "has no shape yet",
            where=where,
            expected="an initialised parameter",
            got=type(value).__name__,
            cure="run the module once before connecting",
        )
    if getattr(value, "_is_flat_param", False):
        raise _refused(
            name,
            "is many parameters in one",
            where=where,
            expected="one tensor for each name of the checkpoint",
            got="FlatParameter of FSDP1",
            cure="shard with FSDP2 (torch.distributed.fsdp.fully_shard), or give a full state dict",
        )
    if value.device.type == "meta":
        raise _refused(
            name,
            "was never materialised",
            where=where,
            expected="a tensor with values",
            got="a tensor on the meta device",
            cure="load the model's weights before connecting",
        )
    local = local_part(value) if is_dtensor(value) else value
    if local.layout is not torch.strided or local.is_quantized or _keeps_values_elsewhere(local):
        raise _refused(
            name,
            "is not a dense tensor",
            where=where,
            expected="a plain torch.Tensor or nn.Parameter, or a DTensor of such",
            got=f"{type(local).__name__} with layout {local.layout} and dtype {local.dtype}",
            cure="convert it first: to_dense() of a sparse one, dequantize() of a quantised one",
        )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor of which each rank keeps a piece, be it of one rank only."""
    placements = tensor.placements if is_dtensor(tensor) else ()  # type: ignore[attr-defined]
    return any(not (place.is_replicate() or place.is_partial()) for place in placements)


def is_gathered(tensor: torch.Tensor) -> bool:
    """Whether :func:`whole` has to make the full tensor, since no rank holds it."""
    if not is_dtensor(tensor):
        return False
    dtensor: Any = tensor
    return not all(
        placement.is_replicate() or (size == 1 and not placement.is_partial())
        for placement, size in zip(dtensor.placements, dtensor.device_mesh.shape, strict=True)
    )


def whole(name: str, tensor: torch.Tensor, *, where: str) -> torch.Tensor:
    """The full tensor, detached: itself or its local part where that has all values.

    Any other DTensor is gathered, which is a collective: every rank of its mesh has to be here. Its
    wait ends with `gathers_within`, else at the timeout of the process group.

    Raises:
        InvalidInfo: This rank is not in the DTensor's mesh.
        TransportError: The gather failed; ``got`` holds torch's words. Or an earlier one was left.
        Timeout: It did not end in time.
    """
    tensor = tensor.detach()
    if is_dtensor(tensor):
        dtensor: Any = tensor
        if dtensor.device_mesh.get_coordinate() is None:
            raise _refused(
                name,
                "is not on this rank",
                where=where,
                expected=f"one of the ranks {dtensor.device_mesh.mesh.flatten().tolist()}",
                got=f"rank {torch.distributed.get_rank()}",
                cure="connect in the ranks of the tensor's device mesh",
            )
        tensor = _gather(name, dtensor, where) if is_gathered(tensor) else local_part(tensor)
    return tensor


def _gather(name: str, dtensor: Any, where: str) -> torch.Tensor:
    try:
        return gathered(name, dtensor, where=where)
    except WeightTransferError:
        raise
    except RuntimeError as error:  # what c10d raises for a lost peer and for a timeout
        raise TransportError(
            f"Tensor {name!r} could not be gathered from the trainer's ranks",
            where=where,
            got=str(error),
            cure="see that every rank of the mesh is alive and walks the source too",
        ) from error


def local_part(dtensor: Any) -> torch.Tensor:
    """What this rank holds of a DTensor, detached."""
    local: Any = dtensor.detach().to_local()
    # An unfinished collective is a tensor class of its own.
    plain: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return plain


def _keeps_values_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether its class takes over every operation, as those of quantised weights do."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _refused(
    name: str, what: str, *, where: str, expected: str, got: str, cure: str
) -> InvalidInfo:
    return InvalidInfo(f"{name!r} {what}", where=where, expected=expected, got=got, cure=cure)
