"""Bytes and tensors that both ends of a check make for themselves, from a seed."""

from __future__ import annotations

import hashlib

import torch

from vllm_wt.packing import DTYPES, as_bytes

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # golden ratio, as a signed word: no two words are the same


def content(nbytes: int, seed: int) -> torch.Tensor:
    """``nbytes`` bytes, other ones at every place and for every seed; shape ``(nbytes,)``, uint8."""
    words = torch.arange(1, (nbytes + 7) // 8 + 1, dtype=torch.int64)
    words.add_(seed * 1_000_003).mul_(_ODD)
    return words.view(torch.uint8)[:nbytes].clone()


def of_dtype(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A contiguous tensor of any bit patterns that the dtype has; bool has two."""
    count = 1
    for size in shape:
        count *= size
    if dtype is torch.bool:
        return (content(count, seed) & 1).to(torch.bool).view(shape)
    return content(count * dtype.itemsize, seed).view(dtype).view(shape)


def tensors(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """Named tensors of one kind; see the functions below."""
    made: dict[str, torch.Tensor] = _KINDS[kind](seed)
    return made


def _few(seed: int) -> dict[str, torch.Tensor]:
    """A model in small: 0.4 MB."""
    return {
        "embed": of_dtype(torch.float32, (64, 256), seed),
        "layer.weight": of_dtype(torch.bfloat16, (256, 300), seed + 1),
        "layer.bias": of_dtype(torch.float16, (301,), seed + 2),
        "scale": of_dtype(torch.float32, (), seed + 3),
        "head": of_dtype(torch.bfloat16, (300, 257), seed + 4),
    }


def _dtypes(seed: int) -> dict[str, torch.Tensor]:
    """Each dtype that may cross, with a vector, a matrix and a scalar."""
    made = {}
    for index, (name, dtype) in enumerate(DTYPES.items()):
        for shape in ((251,), (17, 5), ()):
            made[f"{name}.{len(shape)}d"] = of_dtype(dtype, shape, seed + index)
    return made


def _scalars(seed: int) -> dict[str, torch.Tensor]:
    """No dimensions, and one element in several."""
    return {
        "scale": of_dtype(torch.float32, (), seed),
        "weight": of_dtype(torch.bfloat16, (33, 9), seed + 1),
        "count": of_dtype(torch.int64, (), seed + 2),
        "flag": of_dtype(torch.bool, (), seed + 3),
        "one": of_dtype(torch.float16, (1, 1, 1), seed + 4),
    }


def _empty(seed: int) -> dict[str, torch.Tensor]:
    """No elements, first, between and last."""
    return {
        "none": torch.empty(0),
        "weight": of_dtype(torch.bfloat16, (33, 9), seed),
        "matrix": torch.empty(0, 5, dtype=torch.bfloat16),
        "bias": of_dtype(torch.float32, (31,), seed + 1),
        "last": torch.empty(3, 0, 2, dtype=torch.bool),
    }


def _strided(seed: int) -> dict[str, torch.Tensor]:
    """Memory that does not hold the values in order, or not as they are."""
    matrix = of_dtype(torch.float32, (31, 40), seed)
    brain = of_dtype(torch.bfloat16, (24, 36), seed + 1)
    wave = of_dtype(torch.complex64, (12, 7), seed + 2)
    return {
        "transposed": matrix.t(),
        "strided": matrix[::3, 1::2],
        "offset": matrix.view(-1)[7:1001],
        "expanded": of_dtype(torch.int16, (1, 9), seed + 5).expand(11, 9),
        "permuted": of_dtype(torch.uint8, (3, 4, 5), seed + 6).permute(2, 0, 1),
        "narrowed": brain.narrow(1, 5, 9),
        "conjugated": wave.conj(),
        "negated": wave.conj().imag,
        "plain": of_dtype(torch.int8, (3,), seed + 7),
    }


def _tied(seed: int) -> dict[str, torch.Tensor]:
    """The same memory under several names: whole, and in part."""
    shared = of_dtype(torch.bfloat16, (64, 48), seed)
    return {
        "embed": shared,
        "between": of_dtype(torch.float32, (33,), seed + 1),
        "head": shared,
        "prefix": shared[:10],
        "rest": shared[10:],
    }


def _sizes(seed: int) -> dict[str, torch.Tensor]:
    """48 MB in one tensor, and odd ones around it."""
    return {
        "byte": of_dtype(torch.uint8, (1,), seed),
        "odd": of_dtype(torch.int8, (4099,), seed + 1),
        "large": of_dtype(torch.bfloat16, (24 << 20,), seed + 2),
        "odd.half": of_dtype(torch.float16, (333, 7), seed + 3),
        "medium": of_dtype(torch.float32, (1_500_001,), seed + 4),
        "wide": of_dtype(torch.float64, (5,), seed + 5),
    }


def _many(seed: int) -> dict[str, torch.Tensor]:
    """Ten thousand of a few bytes."""
    whole = content(10_000 * 24, seed)
    return {
        f"layers.{index}.weight": whole[index * 24 : index * 24 + 1 + index % 24]
        for index in range(10_000)
    }


_KINDS = {
    "few": _few,
    "dtypes": _dtypes,
    "scalars": _scalars,
    "empty": _empty,
    "strided": _strided,
    "tied": _tied,
    "sizes": _sizes,
    "many": _many,
}


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes in order, as hex; equal only for the same tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    form = f"{tensor.dtype} {tuple(tensor.shape)} "
    data = as_bytes(plain).numpy().tobytes() if plain.numel() else b""
    return hashlib.sha256(form.encode() + data).hexdigest()


def digests(kind: str, seed: int) -> dict[str, str]:
    """What :func:`tensors` arrive as."""
    return {name: digest(tensor) for name, tensor in tensors(kind, seed).items()}
