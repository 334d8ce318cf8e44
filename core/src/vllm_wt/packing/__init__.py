"""The only packer: where tensors lie in one run of bytes, how it is cut, and the copies at once."""

from vllm_wt.packing.buckets import Buckets, Piece
from vllm_wt.packing.copies import Copies, warm_up
from vllm_wt.packing.layout import ALIGNMENT, DTYPES, Layout, Slot, as_bytes, meta_of, view_as

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "Buckets",
    "Copies",
    "Layout",
    "Piece",
    "Slot",
    "as_bytes",
    "meta_of",
    "view_as",
    "warm_up",
]
