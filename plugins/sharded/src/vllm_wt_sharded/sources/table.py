"""Shards of a trainer that divides its tensors by hand, as Megatron does, by a table of rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from vllm_wt.errors import ManifestMismatch
from vllm_wt.manifest import TensorMeta
from vllm_wt_sharded.sources.base import Piece, ShardedSource
from vllm_wt_sharded.sources.looks import Look
from vllm_wt_sharded.sources.plain import require_plain
from vllm_wt_sharded.sources.rules import ParallelTable, Rule, Split


class TableShards(ShardedSource):
    """The local tensors of one rank, which a `ParallelTable` finds in the checkpoint's.

    All pieces are views of the local tensors: of a fused one, one for each of its names and groups.

    Args:
        state: The local tensors by the trainer's names, read anew in each pass.
        table: What they are.
        tensors: All of the model, other ranks' layers and experts too:
            ``vllm_wt.sources.checkpoint.manifest_of(folder).tensors``, say.
        rank, ranks: As of `ShardedSource`.

    Raises:
        InvalidInfo: From a pass: no rule matches, or this cannot be sent.
        ManifestMismatch: From a pass: a local tensor has not the shape that its rule and the
            checkpoint's tensor say.
    """

    _where = "table"

    def __init__(
        self,
        state: Mapping[str, Any],
        table: ParallelTable,
        *,
        tensors: Iterable[TensorMeta],
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        super().__init__(tensors, rank=rank, ranks=ranks)
        self._state = state
        self._table = table
        self._rules: dict[str, Rule] = {}

    @property
    def device(self) -> torch.device:
        return next((t.device for _, t in self._kept()), torch.device("cpu"))

    def _kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is not left out; a state may hold what is no tensor under other names."""
        for name, value in self._state.items():
            if name not in self._rules:
                self._rules[name] = self._table.rule_of(name)
            if self._rules[name].all_names:
                yield name, value

    def _walk(self) -> Iterator[Piece]:
        for name, value in self._kept():
            require_plain(name, value, where=self._where)
            rule, local = self._rules[name], value.detach()
            metas = [self._meta(name, each) for each in rule.all_names]
            if len(metas) > 1:
                yield from self._fused(name, rule, local, metas)
            else:
                yield self._single(name, rule, local, metas[0])

    def _look(self) -> Look:
        return Look(self._kept())

    def _meta(self, name: str, target: str) -> TensorMeta:
        if target not in self._metas:
            raise self._wrong(
                f"What the table makes of {name!r} is not in the checkpoint",
                expected=f"one of {len(self.tensors)} names, such as {self.tensors[0].name!r}",
                got=f"{target!r}, by the rule {self._rules[name].pattern!r}",
                cure="see the rule's names, and the offsets of layers and experts",
            )
        return self._metas[target]

    def _single(self, name: str, rule: Rule, local: torch.Tensor, meta: TensorMeta) -> Piece:
        split, shape = rule.split, list(meta.shape)
        start = [0] * len(shape)
        if split is not None:
            if split.dim >= min(len(shape), local.dim()):
                raise self._misshapen(name, rule, local, shape, [meta])
            whole, own = shape[split.dim], local.shape[split.dim]
            if rule.padded and own * split.count >= whole:
                start[split.dim] = min(split.index * own, whole)
                kept = min(own, whole - start[split.dim])
                local = local.narrow(split.dim, 0, kept)
                shape[split.dim] = kept
            else:
                self._require_even(name, whole, split.count, split)
                shape[split.dim] = whole // split.count
                start[split.dim] = split.index * shape[split.dim]
        if list(local.shape) != shape:
            raise self._misshapen(name, rule, local, shape, [meta])
        return Piece(meta.name, tuple(start), local)

    def _fused(
        self, name: str, rule: Rule, local: torch.Tensor, metas: list[TensorMeta]
    ) -> Iterator[Piece]:
        split = rule.split or Split(0, 0, 1)
        groups = rule.groups or split.count
        for meta in metas:
            if not meta.shape or meta.shape[1:] != metas[0].shape[1:]:
                raise self._misshapen(name, rule, local, list(metas[0].shape), metas)
            self._require_even(meta.name, meta.shape[0], groups, rule)
        rows = [meta.shape[0] // groups for meta in metas]
        own = groups // split.count
        expected = [own * sum(rows), *metas[0].shape[1:]]
        if list(local.shape) != expected:
            raise self._misshapen(name, rule, local, expected, metas)
        first = 0
        for group in range(split.index * own, (split.index + 1) * own):
            for meta, height in zip(metas, rows, strict=True):
                start = (group * height, *[0] * (len(meta.shape) - 1))
                yield Piece(meta.name, start, local.narrow(0, first, height))
                first += height

    def _require_even(self, name: str, whole: int, count: int, by: object) -> None:
        if whole % count:
            raise self._wrong(
                f"Tensor {name!r} cannot be divided as its rule says",
                expected=f"a length that {count} divides",
                got=f"{whole}, by {by}",
                cure="see the rule's split and groups; set padded=True for a padded vocabulary",
            )

    def _misshapen(
        self,
        name: str,
        rule: Rule,
        local: torch.Tensor,
        expected: list[int],
        metas: list[TensorMeta],
    ) -> ManifestMismatch:
        full = ", ".join(f"{meta.name} {list(meta.shape)}" for meta in metas)
        return self._wrong(
            f"The local tensor {name!r} is not the part of the checkpoint's that its rule says",
            expected=f"shape {expected}, {math.prod(expected)} elements, of {full}",
            got=f"shape {list(local.shape)}; the rule {rule.pattern!r} with {rule.split}, "
            f"groups={rule.groups}, padded={rule.padded}",
            cure="see the rule's split, its groups and the order of its names",
        )
