"""Shape of the drafts of a step: a chain, or a tree of which the target model accepts one path.

Node 0 is the root, the last known token. Drafts are nodes 1, 2, ... in order of their likelihood, parents before
children, so the first n drafts are the best tree of n drafts.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

MAX_TREE_NODES = 63  # with the root as many as an integer has bits
MAX_CHAIN_POSITIONS = 2  # sampled positions of a row up to which every tree is a chain


class TreeShape(NamedTuple):
    """Limits of a draft tree. With `branching` 1 it is a chain, whatever the other fields say."""

    branching: int = 1  # most children of a node
    max_depth: int = 0  # most drafts on one path
    num_drafts: int = 0  # most drafts in all
    dynamic: bool = True  # grown where the drafter is most confident (EAGLE-2); False: the same tree in every step

    @property
    def is_tree(self) -> bool:
        return self.branching > 1

    def is_tree_step(self, positions: int) -> bool:
        """Whether the drafts of a step may branch, if it samples this many positions of a row."""
        return self.is_tree and positions > MAX_CHAIN_POSITIONS

    def max_accepted(self, num_drafts: int) -> int:
        """How many of `num_drafts` drafts can be accepted."""
        return min(num_drafts, self.max_depth) if self.is_tree else num_drafts

    def num_expanded(self) -> int:
        """Nodes whose children a dynamic tree computes: the best `branching` of each level but the last."""
        return self.branching * (self.max_depth - 1)

    def num_candidates(self) -> int:
        """Nodes that the drafts are chosen from."""
        if self.dynamic:
            return self.branching * (1 + self.num_expanded())
        return sum(self.branching**depth for depth in range(1, self.max_depth + 1))

    def reserved_columns(self, num_drafts: int) -> int:
        """KV columns that drafting and verifying may write, from the column of the last known token on.

        Drafting writes the root and each expanded node; verifying writes the drafts.
        """
        if num_drafts and self.is_tree and self.dynamic:
            return max(num_drafts, 1 + self.num_expanded())
        return num_drafts


CHAIN = TreeShape()


def tree_depth(parents: Sequence[int]) -> int:
    """Depth of the tree whose node i has the parent `parents[i - 1]`."""
    depths = [0]
    for parent in parents:
        depths.append(1 + depths[parent])
    return max(depths)
