"""How a trainer that shards by hand, as Megatron does, says what its local tensors are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from vllm_wt.errors import InvalidInfo
from vllm_wt_sharded.layout import BACKEND

_WHERE = "ParallelTable"


@dataclass(frozen=True)
class Split:
    """One dimension that is divided evenly among the ranks of a group, of which this is one.

    Args:
        dim: The dimension, from 0.
        index: Of this rank in the group, from 0.
        count: How many ranks the group has.

    Raises:
        InvalidInfo: There is no such dimension or rank.
    """

    dim: int
    index: int
    count: int

    def __post_init__(self) -> None:
        if self.dim < 0 or not 0 <= self.index < self.count:
            raise _invalid(
                "This is no part of a dimension",
                where="Split",
                expected="a dimension from 0, and an index from 0 below the count",
                got=f"dim={self.dim}, index={self.index}, count={self.count}",
                cure="give the rank in the tensor- or expert-parallel group, and the group's size",
            )


@dataclass(frozen=True)
class Rule:
    r"""What the local tensors of some names are in the checkpoint.

    A fused tensor has several names. Its rows are groups one after another, and each group has some
    rows of each of these, in their order: of ``linear_qkv``, the rows of q, k and v that belong to one
    query group. How many rows follows from the checkpoint's shapes.

    Args:
        pattern: Regular expression for the whole of the trainer's name. Its named groups stand in
            ``names`` in braces: ``decoder\.layers\.(?P<layer>\d+)\.mlp\.linear_fc1\.weight``.
        names: The checkpoint's name, or several of a fused tensor; empty to leave the tensor out.
        split: How it is divided; by default this rank has all of it.
        groups: Of a fused tensor: how many groups the full one has, over all ranks, such as the number
            of query groups. By default each rank has one, as ``linear_fc1``: [gate; up].
        padded: The trainer's full tensor may be longer in the divided dimension than the checkpoint's,
            as a vocabulary is; what is beyond the end is not sent.

    Raises:
        InvalidInfo: The rule makes no sense.
    """

    pattern: str
    names: str | tuple[str, ...]
    split: Split | None = None
    groups: int | None = None
    padded: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise self._wrong("a regular expression", f"{error}") from error
        if self.padded and (self.split is None or len(self.all_names) != 1):
            raise self._wrong("one name and a split of what is padded", "padded without")
        if self.groups is not None and len(self.all_names) < 2:
            raise self._wrong("several names of what has groups", f"groups={self.groups}")
        if len(self.all_names) > 1:
            if self.split is not None and self.split.dim != 0:
                raise self._wrong("a fused tensor that is split by rows", f"{self.split}")
            count = 1 if self.split is None else self.split.count
            if self.groups is not None and (self.groups < 1 or self.groups % count):
                raise self._wrong(f"groups that {count} ranks divide evenly", f"{self.groups}")

    @property
    def all_names(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names

    def _wrong(self, expected: str, got: str) -> InvalidInfo:
        return _invalid(
            "A rule makes no sense",
            where=f"the rule {self.pattern!r}",
            expected=expected,
            got=got,
            cure="see vllm_wt_sharded.sources.Rule for what goes together",
        )


@dataclass(frozen=True)
class ParallelTable:
    r"""Rules for all of one rank's tensors; the first one that matches a name counts.

    Args:
        rules: In order.
        offsets: What to add to a number that a named group has matched: ``{"layer": 12}`` where the
            first layer of this pipeline stage is the model's 13th, ``{"expert": 8}`` where its first
            expert is the 9th. With several model chunks a rank, give their tensors the model's numbers.
        unmatched: What to do with a name that no rule matches: ``"refuse"`` it, or take it for a tensor
            that is ``"whole"`` on this rank, under its own name.

    Raises:
        InvalidInfo: An offset is of no rule.
    """

    rules: Sequence[Rule]
    offsets: Mapping[str, int] = field(default_factory=dict)
    unmatched: Literal["refuse", "whole"] = "refuse"

    def __post_init__(self) -> None:
        known = {name for pattern, _ in self._compiled for name in pattern.groupindex}
        for name in self.offsets:
            if name not in known:
                raise _invalid(
                    f"No rule has a number {name!r}",
                    where="offsets",
                    expected=f"one of {sorted(known)}",
                    got=name,
                    cure=rf"name it in a pattern: (?P<{name}>\d+)",
                )

    def rule_of(self, name: str) -> Rule:
        """The rule for one of the trainer's names, with the checkpoint's names filled in.

        Raises:
            InvalidInfo: None matches, or it does not fit.
        """
        for pattern, rule in self._compiled:
            match = pattern.fullmatch(name)
            if match is not None:
                names = tuple(self._filled(each, match) for each in rule.all_names)
                return Rule(rule.pattern, names, rule.split, rule.groups, rule.padded)
        if self.unmatched == "whole":
            return Rule(re.escape(name), name)
        raise _invalid(
            f"No rule says what the tensor {name!r} is",
            where=_WHERE,
            expected=f"a name that one of {len(self.rules)} rules matches as a whole",
            got=name,
            cure="add a rule, with names=() to leave it out; or set unmatched='whole' if every rank "
            "that has such a tensor has all of it, under the checkpoint's name",
        )

    @cached_property
    def _compiled(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(re.compile(rule.pattern), rule) for rule in self.rules]

    def _filled(self, template: str, match: re.Match[str]) -> str:
        values: dict[str, object] = dict(match.groupdict())
        for name, offset in self.offsets.items():
            if (text := values.get(name)) is not None:
                if not str(text).isdecimal():
                    raise self._unfit(template, match, f"a number as {name!r}", text)
                values[name] = int(str(text)) + offset
        try:
            return template.format(**values)
        except (KeyError, IndexError, ValueError) as error:
            raise self._unfit(
                template, match, f"one of {sorted(values)} in braces", error
            ) from error

    def _unfit(
        self, template: str, match: re.Match[str], expected: str, got: object
    ) -> InvalidInfo:
        return _invalid(
            f"The checkpoint's name of {match.string!r} cannot be made",
            where=f"the rule {match.re.pattern!r} and the name {template!r}",
            expected=expected,
            got=got,
            cure=r"name what stands in braces in the pattern: (?P<layer>\d+)",
        )


def _invalid(what: str, *, where: str, expected: str, got: object, cure: str) -> InvalidInfo:
    return InvalidInfo(what, backend=BACKEND, where=where, expected=expected, got=got, cure=cure)
