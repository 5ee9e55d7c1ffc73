"""Nested containers of tensors: what a module or a loss may take and give.

Why: dicts, lists, tuples, named tuples and whatever is registered with torch (such as the outputs
of Hugging Face's models) are walked as torch itself walks them. Public instead: none in torch;
`optree` is another package, which does not know what is registered with torch.
"""

from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
