"""A tensor of which each rank has a tile, and which function of torch's may be called on it."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import FrameType
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tonari.trainer.errors import ConfigError
from tonari.trainer.private.autograd import ABOUT_MEMORY
from tonari.trainer.private.dispatch import DisableTorchFunction, make_wrapper
from tonari.trainer.private.trees import tree_leaves, tree_map
from tonari.trainer.tiles.exchange import Move, fetch
from tonari.trainer.tiles.grid import Grid, Starts, even_starts


@dataclass(frozen=True)
class CutDim:
    """How one dimension is cut.

    Attributes:
        dim: Of the tensor.
        axis: Of the grid.
        starts: Of the parts.
    """

    dim: int
    axis: int
    starts: Starts
    before: ClassVar[int] = 0

    @property
    def size(self) -> int:
        """Positions of the whole."""
        return self.starts[-1]

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tensors that meet have alike, wherever each is cut."""
        return (self.dim, self.axis, self.size)

    @property
    def apart(self) -> "tuple[CutDim, ...]":
        """The cuts of the dimensions that became this one: itself."""
        return (self,)

    @property
    def least(self) -> int:
        """Positions of the smallest tile."""
        return min(end - start for start, end in pairwise(self.starts))

    def num_here(self, grid: Grid) -> int:
        """Count the positions of this rank's tile."""
        at = grid.coordinates[self.axis]
        return self.starts[at + 1] - self.starts[at]

    def part_of(self, values: Tensor, grid: Grid) -> Tensor:
        """Take this rank's tile of a whole tensor."""
        first = self.starts[grid.coordinates[self.axis]]
        return values.narrow(self.dim, first, self.num_here(grid))


@dataclass(frozen=True)
class Merged:
    """Neighbouring dimensions that became one, the last one fastest, as the tokens of patches.

    Attributes:
        dim: Of the tensor.
        sizes: Of the dimensions, of the whole.
        cuts: Of those that are cut, whose ``dim`` counts in ``sizes``.
        before: Positions before all others that each rank has alike, such as a class token.
    """

    dim: int
    sizes: tuple[int, ...]
    cuts: tuple[CutDim, ...]
    before: int = 0

    @property
    def size(self) -> int:
        """Positions of the whole."""
        return self.before + math.prod(self.sizes)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tensors that meet have alike, wherever each is cut."""
        return (self.dim, self.sizes, *(cut.identity for cut in self.cuts), self.before)

    @property
    def apart(self) -> tuple[CutDim, ...]:
        """The cuts of the dimensions that became this one, in its place."""
        return tuple(replace(cut, dim=cut.dim + self.dim) for cut in self.cuts)

    @property
    def least(self) -> int:
        """Positions of the smallest tile, and those before them."""
        whole = math.prod(cut.size for cut in self.cuts)
        return self.before + (self.size - self.before) // whole * math.prod(
            cut.least for cut in self.cuts
        )

    def num_here(self, grid: Grid) -> int:
        """Count the positions of this rank's tile, and those before them."""
        return self.before + math.prod(self.sizes_here(grid))

    def sizes_here(self, grid: Grid) -> list[int]:
        """List the sizes of the dimensions in this rank's tile."""
        sizes = [*self.sizes]
        for cut in self.cuts:
            sizes[cut.dim] = cut.num_here(grid)
        return sizes

    def part_of(self, values: Tensor, grid: Grid) -> Tensor:
        """Take this rank's tile of a whole tensor, and the positions before."""
        alike, rest = values.tensor_split([self.before], self.dim)
        rest = torch.unflatten(rest, self.dim, self.sizes)
        for cut in self.apart:
            rest = cut.part_of(rest, grid)
        return self.join(alike, rest)

    def join(self, alike: Tensor, rest: Tensor) -> Tensor:
        """Merge the dimensions once more, behind the positions that each rank has."""
        rest = rest.flatten(self.dim, self.dim + len(self.sizes) - 1)
        return torch.cat([alike, rest], self.dim) if self.before else rest


Cut = CutDim | Merged


class TooShort(Exception):
    """A dimension has fewer positions than parts: what follows is computed whole, on each rank."""


class TiledTensor(Tensor):
    """A tensor that has its whole shape, and of its numbers this rank's tile.

    A function that is called on it computes what it would of the whole tensor, or is refused with a
    ConfigError that names the module. No other way leads to the numbers but ``local``.

    Tensors that are not tiled are the same on each rank. One that has all positions of a cut
    dimension, such as a table of coordinates, may stand beside a tiled one.

    Attributes:
        local: This rank's tile, a plain tensor.
        grid: The tiles.
        cuts: One for each axis of the grid that has several parts; or one of all, merged.
        learns: Whether it comes from a model that was called for gradients.
    """

    local: Tensor
    grid: Grid
    cuts: tuple[Cut, ...]
    learns: bool

    def __new__(cls, local: Tensor, grid: Grid, cuts: Iterable[Cut]) -> "TiledTensor":
        shape, cuts = [*local.shape], tuple(cuts)
        for cut in cuts:
            expected = cut.num_here(grid)
            if shape[cut.dim] != expected:
                raise ConfigError(
                    f"tiles: a tile is {shape}, expected {expected} in dimension {cut.dim}, of "
                    f"{cut.size} in {' x '.join(map(str, grid.parts))} parts; give each rank what "
                    "Grid.slices names"
                )
            shape[cut.dim] = cut.size
        # It asks for a gradient, so that torch shows it to no function of autograd unasked.
        made = make_wrapper(
            cls, shape, dtype=local.dtype, device=local.device,
            requires_grad=local.is_floating_point(),
        )  # fmt: skip
        made.local, made.grid, made.cuts, made.learns = local, grid, cuts, False
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call what computes a function on tiles, with torch's own meaning of plain tensors."""
        # NumPy's name, which torch takes everywhere
        named = {"dim" if key == "axis" else key: value for key, value in (kwargs or {}).items()}
        with DisableTorchFunction():
            learns = any(tile.learns for tile in _tiles((args, named)))
            if func in METADATA:
                return func(*args, **named)
            if (
                learns
                and not torch.is_grad_enabled()
                and any(frame.f_code is APPLY for frame in _frames())
            ):
                refuse(
                    func, "in a torch.autograd.Function has the gradient of one tile", OWN_FUNCTION
                )
            compute = FUNCTIONS.get(func)
            if compute is None or named.get("out") is not None:
                refuse(func, "is not known to be computed tile by tile", UNKNOWN)
            try:
                given = compute(func, *args, **named)
            except TooShort:
                given = func(*tree_map(whole, args), **tree_map(whole, named))
            for tile in _tiles(given):
                tile.learns |= learns
            return given

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse what got past the functions: a view by autograd itself, ``data``, a copy."""
        refuse(func, "would see no numbers", UNKNOWN)

    def like(self, local: Tensor, cuts: Iterable[Cut] | None = None) -> "TiledTensor":
        """Make a tile of this grid."""
        return TiledTensor(local, self.grid, self.cuts if cuts is None else cuts)

    def needed(
        self, cut: CutDim, needed: Iterable[tuple[int, int]], fill: float | None = 0.0
    ) -> Move:
        """Describe how the positions along a cut come to those who need them."""
        return Move(self.grid, cut.axis, cut.dim, cut.starts, tuple(needed), fill)

    def brought(self, needed: Callable[[CutDim], Iterable[tuple[int, int]]]) -> Tensor:
        """Get positions of each cut dimension that ranks need. Collective."""
        cut, alike, local = self.cuts[0] if self.cuts else None, self.local, self.local
        if isinstance(cut, Merged):
            alike, local = local.tensor_split([cut.before], cut.dim)
            local = torch.unflatten(local, cut.dim, cut.sizes_here(self.grid))
        moves = [self.needed(each, needed(each)) for cut in self.cuts for each in cut.apart]
        local = fetch(local, moves)
        return cut.join(alike, local) if isinstance(cut, Merged) else local

    def refetched(self, cuts: Sequence[Cut]) -> Tensor:
        """Give this rank's tile by other cuts of the same dimensions. Collective."""
        by_dim = {each.dim: each for cut in cuts for each in cut.apart}
        return self.brought(lambda cut: spans(by_dim[cut.dim].starts))

    def spatial(self, func: Any) -> list[CutDim]:
        """List its cuts, for what computes along them."""
        if any(isinstance(cut, Merged) for cut in self.cuts):
            refuse(func, "goes along dimensions of tiles that became one", UNKNOWN)
        return [cut for cut in self.cuts if isinstance(cut, CutDim)]

    def aligned(self, value: Any) -> Any:
        """Give the part of a tensor beside this one that belongs to this rank's tile.

        Dimensions are counted from the last one, as in broadcasting. Collective.
        """
        if not isinstance(value, Tensor):
            return value
        cuts = [replace(cut, dim=cut.dim - self.ndim + value.ndim) for cut in self.cuts]
        if isinstance(value, TiledTensor):
            if [cut.identity for cut in value.cuts] != [cut.identity for cut in cuts]:
                raise ConfigError(
                    f"tiles: tensors of {[*self.shape]} and {[*value.shape]} meet, of which other "
                    "dimensions are cut; give them the same ones"
                )
            return value.local if [*value.cuts] == cuts else value.refetched(cuts)
        for cut in cuts:
            if cut.dim < 0 or value.shape[cut.dim] == 1:
                continue
            if value.shape[cut.dim] != cut.size:
                raise ConfigError(
                    f"tiles: a tensor of {[*value.shape]} meets tiles of {[*self.shape]}, expected "
                    f"{cut.size} or 1 in dimension {cut.dim}, as one process needs it; give "
                    "it whole, or tonari.trainer.tiles.tiled(...) of what this rank has of it"
                )
            value = cut.part_of(value, self.grid)
        return value

    def behind(self, values: Tensor) -> "TiledTensor":
        """Tile what was computed of tiles, dimensions counted from the last one."""
        more = values.ndim - self.ndim
        return self.like(values, [replace(cut, dim=cut.dim + more) for cut in self.cuts])

    @property
    def cut_dims(self) -> tuple[int, ...]:
        """Those that are cut."""
        return tuple(cut.dim for cut in self.cuts)


Compute = Callable[..., Any]
Computes = TypeVar("Computes", bound=Compute)
FUNCTIONS: dict[Any, Compute] = {}
"""What computes a function of torch's: it is called with the function, and with its arguments."""

UNKNOWN = (
    "compute it position by position, after pooling, or on tonari.trainer.tiles.whole(x), which "
    "every rank then has whole"
)
OWN_FUNCTION = "write it by torch's functions; or call checkpoint with use_reentrant=False"
APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "itemsize", "is_cpu", "is_cuda",
              "is_meta", "is_mps", "is_nested", "is_quantized", "is_sparse")  # fmt: skip
METHODS = ("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex",
           "__len__", "element_size", "get_device")  # fmt: skip
METADATA: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in PROPERTIES),
    *(getattr(Tensor, name) for name in METHODS),
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""They answer of the whole tensor."""
FUNCTIONS[Tensor.requires_grad.__get__] = lambda func, tile: func(tile.local)  # type: ignore[attr-defined]
FUNCTIONS[Tensor.requires_grad_] = lambda func, tile, *on: tile.like(func(tile.local, *on))
# What sharded parameters ask of an answer, and recomputed blocks of what they are given.
for _asked in ABOUT_MEMORY:
    FUNCTIONS[_asked] = lambda func, tile: func(tile.local)


def computes(*names: str) -> Callable[[Computes], Computes]:
    """Register what computes functions of torch's, of tensors and of ``nn.functional``, by name."""

    def register(compute: Computes) -> Computes:
        for name in names:
            for holder in (torch, Tensor, F):
                if hasattr(holder, name):
                    FUNCTIONS[getattr(holder, name)] = compute
        return compute

    return register


def refuse(func: Any, why: str, cure: str) -> NoReturn:
    """Refuse a call, by the name of the module that makes it.

    Raises:
        ConfigError: Always.
    """
    callers = [frame.f_locals.get("self") for frame in _frames()]
    modules = [caller for caller in callers if isinstance(caller, nn.Module)]
    # Of a property the function is its __get__.
    name = getattr(func, "__name__", str(func))
    name = getattr(getattr(func, "__self__", None), "__name__", name)
    where = "tiles"
    if modules:
        names = {id(module): name for name, module in modules[-1].named_modules()}
        path = names.get(id(modules[0])) or "the model"
        where = f"tiles: {path} ({type(modules[0]).__name__})"
    raise ConfigError(f"{where}: {name} {why}; {cure}")


def _hook(func: Any, tile: TiledTensor, hook: Any) -> Any:
    """Let torch's sharding see when a gradient comes, whose numbers it does not look at."""
    if not (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp."):
        refuse(func, "would see the gradient of a tile", UNKNOWN)
    return func(tile.local, hook)


FUNCTIONS[Tensor.register_hook] = _hook


def spans(starts: Starts) -> list[tuple[int, int]]:
    """List first position and end of each part."""
    return list(pairwise(starts))


def tiled(local: Tensor, grid: Grid, sizes: Sequence[int]) -> TiledTensor:
    """Say of a tensor that it is this rank's tile.

    Args:
        local: Its last dimensions are the spatial ones, of the tile that `Grid.slices` names.
        grid: The tiles.
        sizes: Of all spatial dimensions of the whole sample.

    Raises:
        ConfigError: If it is not of that size.
    """
    first = local.ndim - len(sizes)
    cuts = [
        CutDim(first + axis, axis, even_starts(sizes[axis], parts))
        for axis, parts in enumerate(grid.parts)
        if parts > 1
    ]
    return TiledTensor(local, grid, cuts)


def whole(value: Any) -> Any:
    """Gather a tiled tensor on every rank; others are given back as they are. Collective.

    What is computed of it is then computed on every rank alike.
    """
    if not isinstance(value, TiledTensor):
        return value
    with DisableTorchFunction():
        return value.brought(lambda cut: [(0, cut.size)] * (len(cut.starts) - 1))


def _tiles(values: Any) -> Iterator[TiledTensor]:
    return (each for each in tree_leaves(values) if isinstance(each, TiledTensor))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
