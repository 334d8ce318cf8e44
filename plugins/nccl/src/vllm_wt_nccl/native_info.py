"""What vLLM's four calls bring to a worker in the native form: the fields of vLLM's own backend.

Names, order and defaults are those of vLLM's ``nccl`` backend; ``deadline_s`` is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from vllm_wt.deadline import INIT_S, ROUND_S
from vllm_wt.errors import InvalidInfo
from vllm_wt.info import Seconds
from vllm_wt.manifest import Manifest, TensorMeta
from vllm_wt.native import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm_wt.packing import DTYPES
from vllm_wt_nccl.info import Host, Port
from vllm_wt_nccl.native_parcels import Packing

PACKED_BUFFER_SIZE_BYTES = 1 << 30
"""Default size of a parcel of packed tensors."""
PACKED_NUM_BUFFERS = 2
"""Default number of buffers of a side."""
_MOST_NBYTES = 1 << 46
"""Of all tensors of one update; more is a mistake in the shapes."""

Number = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""A rank or a count of ranks: whether it fits is judged where those of all sides are known."""
Nbytes = Annotated[int, Field(ge=1, lt=2**48)]
Buffers = Annotated[int, Field(ge=1, le=1024)]


@dataclass
class NCCLWeightTransferInitInfo(WeightTransferInitInfo):
    """Where the trainer is met, and which ranks this engine's workers have.

    Args:
        master_address: Of the trainer, a name or an address; one of the trainer's host.
        master_port: Likewise.
        rank_offset: Rank of this engine's first worker; the trainer is 0.
        world_size: The trainer, and all workers of all engines.
        packed: For updates that don't say; so are the next two.
        packed_buffer_size_bytes: See `NCCLWeightTransferUpdateInfo`.
        packed_num_buffers: Likewise.
        nccl_unique_id_b64: Of vLLM 0.28 and later, for trainers without torch; refused.
        deadline_s: For all to come.
    """

    master_address: Host
    master_port: Port
    rank_offset: Number
    world_size: Number
    packed: bool = False
    packed_buffer_size_bytes: Nbytes = PACKED_BUFFER_SIZE_BYTES
    packed_num_buffers: Buffers = PACKED_NUM_BUFFERS
    nccl_unique_id_b64: str | None = None
    deadline_s: Seconds = INIT_S

    @property
    def packing(self) -> Packing:
        """Of updates that don't say."""
        return Packing(self.packed, self.packed_buffer_size_bytes, self.packed_num_buffers)

    def require_supported(self) -> None:
        """Refuse what only vLLM's own backend has.

        Raises:
            InvalidInfo: There is some of it.
        """
        if self.nccl_unique_id_b64 is not None:
            raise unsupported("nccl_unique_id_b64", "give master_address and master_port instead")


@dataclass
class NCCLWeightTransferUpdateInfo(WeightTransferUpdateInfo):
    """The tensors that the trainer sends now, in its order.

    Args:
        names: By which the model's ``load_weights`` knows them.
        dtype_names: As torch has them, without ``torch.``.
        shapes: Of the full tensors.
        packed: Whether several tensors come in one broadcast; what init said by default.
        packed_buffer_size_bytes: Most bytes of one, unless a tensor is larger. As the trainer has it.
        packed_num_buffers: Of this side; need not be the trainer's.
        is_checkpoint_format: Of some releases of vLLM; only ``True`` is supported.
        deadline_s: For all of it.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    packed_buffer_size_bytes: Nbytes | None = None
    packed_num_buffers: Buffers | None = None
    is_checkpoint_format: bool = True
    deadline_s: Seconds = ROUND_S

    def packing(self, default: Packing) -> Packing:
        """How the tensors come."""
        return Packing(
            default.packed if self.packed is None else self.packed,
            self.packed_buffer_size_bytes or default.buffer_nbytes,
            self.packed_num_buffers or default.buffers,
        )

    def manifest(self) -> Manifest:
        """The tensors, checked.

        Raises:
            InvalidInfo: The lists don't fit together, or say what cannot be.
            ManifestMismatch: An unknown dtype, an impossible shape, a name twice.
        """
        if not self.is_checkpoint_format:
            raise unsupported("is_checkpoint_format", "send the tensors as a checkpoint has them")
        lengths = {len(self.names), len(self.dtype_names), len(self.shapes)}
        if len(lengths) > 1 or not self.names:
            raise InvalidInfo(
                "names, dtype_names and shapes must have one entry for each tensor",
                where="names, dtype_names, shapes",
                expected="three lists of one length, one at least",
                got=f"{len(self.names)} names, {len(self.dtype_names)} dtype_names, "
                f"{len(self.shapes)} shapes",
                cure="make all three from the same list of tensors",
            )
        rows = zip(self.names, self.dtype_names, self.shapes, strict=True)
        manifest = Manifest(tuple(TensorMeta(name, d, tuple(shape)) for name, d, shape in rows))
        for tensor in manifest.tensors:
            if tensor.dtype not in DTYPES:
                raise InvalidInfo(
                    f"This torch has no dtype {tensor.dtype}, which {tensor.name!r} has",
                    where="dtype_names",
                    expected=f"one of {', '.join(DTYPES)}",
                    got=tensor.dtype,
                    cure="cast it in the trainer, or install a later torch beside vLLM",
                )
        if manifest.nbytes > _MOST_NBYTES:
            raise InvalidInfo(
                "The tensors are larger than any model",
                where="shapes",
                expected=f"at most {_MOST_NBYTES} bytes in all",
                got=f"{manifest.nbytes} bytes",
                cure="check the shapes",
            )
        return manifest


def unsupported(field: str, cure: str) -> InvalidInfo:
    """What vLLM's own backend has, and this one has not."""
    return InvalidInfo(
        f"The field {field!r} has a value that this backend does not support",
        where=field,
        expected="none, as by default",
        got="a value",
        cure=cure,
    )
