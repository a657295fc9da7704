"""Fourth moments of a leave-one-out group, by set partitions.

The gradients of a group of G sequences, less their mean, sum to

    T = sum_i A_i - 1 / (G - 1) sum_{i != k} c_i Y_k,    A = X - E[C] Y - E[Y] C,

with A, c and Y centred (Hoeffding's decomposition). T_j T_j T_l T_l is a sum of products over up to eight indices.
Which of them are the same sequence is a set partition; its expectation is a product of expectations, one for each of
its b blocks, and it stands for G (G - 1) ... (G - b + 1) choices of sequences. A block of one index alone is zero.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from math import perm

import numpy as np

Block = tuple[str, ...]  # of "c", and of "A" and "Y" with the coordinate they are taken at: "Aj", "Yl"
Expect = Callable[[Block], np.ndarray]  # ``[d, d]`` over j and l, of length 1 where it is summed over or there is none


@lru_cache
def patterns() -> Counter[tuple[tuple[Block, ...], int]]:
    """Every product of block expectations, with its number of factors -1 / (G - 1), and how often it comes."""
    found: Counter[tuple[tuple[Block, ...], int]] = Counter()
    for kinds in itertools.product((False, True), repeat=4):
        slots = [
            (name, factor)
            for factor, (pair, coordinate) in enumerate(zip(kinds, "jjll", strict=True))
            for name in (("c", f"Y{coordinate}") if pair else (f"A{coordinate}",))
        ]
        for partition in _partitions(slots):
            blocks = tuple(sorted(tuple(sorted(name for name, _ in block)) for block in partition))
            found[blocks, sum(kinds)] += 1
    return found


def _partitions(slots: list[tuple[str, int]]) -> Iterator[list[list[tuple[str, int]]]]:
    """Partitions without blocks of one; the two indices of one factor differ."""

    def place(i: int, blocks: list[list[tuple[str, int]]]) -> Iterator[list[list[tuple[str, int]]]]:
        if sum(len(block) == 1 for block in blocks) > len(slots) - i:
            return
        if i == len(slots):
            yield blocks
            return
        for k, block in enumerate(blocks):
            if all(factor != slots[i][1] for _, factor in block):
                yield from place(i + 1, [*blocks[:k], [*block, slots[i]], *blocks[k + 1 :]])
        yield from place(i + 1, [*blocks, [slots[i]]])

    return place(0, [])


def fourth_of_group(expect: Expect, group: int) -> float:
    """E |T|^4 of a group of that size."""
    every = patterns()
    known = {block: expect(block) for block in {block for blocks, _ in every for block in blocks}}
    return sum(
        count * perm(group, len(blocks)) * (-1 / (group - 1)) ** n
        * float(reduce(np.multiply, [known[block] for block in blocks]).sum())
        for (blocks, n), count in every.items()
    )  # fmt: skip
