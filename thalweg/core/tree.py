"""The shape of what is drafted in a step: a chain, or a tree of which the target draws one path.

Nodes are numbered from 1, parents before their children, in the order of their likelihood, so that the first n of them are a tree themselves, and the
best of n nodes; node 0 is the root, the last known token."""

from __future__ import annotations

from typing import NamedTuple, Sequence

MOST_NODES = 63  # with the root as many as an integer has bits
CHAIN_QUERY = 2  # positions up to which a tree has one path, whatever its shape


class TreeShape(NamedTuple):
    """branches: children of a node at most; 1 is a chain, whatever the rest says. deepest: drafts one behind the other, nodes: drafts in all, at
    most. dynamic: grown where the drafter is most certain (EAGLE-2), else the same in every step."""

    branches: int = 1
    deepest: int = 0
    nodes: int = 0
    dynamic: bool = True

    @property
    def on(self) -> bool:
        return self.branches > 1

    def parts(self, query: int) -> bool:
        """Whether drafts may part ways in a step that samples so many positions of a row."""
        return self.on and query > CHAIN_QUERY

    def right(self, drafts: int) -> int:
        """How many of so many drafts may be accepted."""
        return min(drafts, self.deepest) if self.on else drafts

    def grown(self) -> int:
        """Nodes that a dynamic tree is computed from: of each level but the last the best `branches`."""
        return self.branches * (self.deepest - 1)

    def most(self) -> int:
        """Nodes that there are to choose from."""
        if self.dynamic:
            return self.branches * (1 + self.grown())
        return sum(self.branches**depth for depth in range(1, self.deepest + 1))

    def room(self, width: int) -> int:
        """Columns from that of the last known token on that may be written when so many are drafted: that of the token itself, and of each draft but
        those that nothing is drafted behind; and no fewer than those of the drafts when they are verified."""
        return max(width, 1 + self.grown()) if width and self.on and self.dynamic else width


CHAIN = TreeShape()


def depth(parents: Sequence[int]) -> int:
    """Of a tree whose node i has the parent `parents[i - 1]`."""
    depths = [0]
    for parent in parents:
        depths.append(1 + depths[parent])
    return max(depths)
