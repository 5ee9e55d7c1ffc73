"""What autograd keeps of a block's forward pass, on its way to the host's memory and back."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tonari.trainer.private.autograd import version_of
from tonari.trainer.private.dispatch import is_traceable_wrapper_subclass
from tonari.trainer.private.messages import AsyncCollectiveTensor
from tonari.trainer.private.storages import storage_id


class Lanes:
    """Two streams beside that of the computation; on the CPU, none."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._out, self._back = (
            torch.cuda.Stream(device) if self.on_gpu else None  # type: ignore[no-untyped-call]
            for _ in range(2)
        )

    def copy_out(self, source: Tensor) -> Tensor:
        """Copy bytes to the host, once they are computed."""
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self.on_gpu)
        return self._copy(host, source, self._out)

    def copy_back(self, host: Tensor) -> Tensor:
        """Copy them to the device, into memory that what was computed before has left."""
        here = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        return self._copy(here, host, self._back)

    def _copy(self, target: Tensor, source: Tensor, lane: Any) -> Tensor:
        if lane is None:
            return target.copy_(source)
        lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(lane):
            return target.copy_(source, non_blocking=True)

    def mark_out(self) -> Any:
        """Mark the end of copies to the host, which `wait` waits for."""
        return None if self._out is None else self._out.record_event()

    def mark_back(self) -> Any:
        """Mark the end of copies to the device."""
        return None if self._back is None else self._back.record_event()

    def wait(self, mark: Any) -> None:
        """Have the computation wait for a mark; the process goes on."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


@dataclass(eq=False)
class KeptTensor:
    """The bytes of one storage: on the device, in the host's memory, or on their way."""

    here: Tensor | None
    host: Tensor | None
    source: Tensor | None
    version: int
    """Of the source, as it was kept."""
    has_changed: bool = False
    """In place, so that a copy may have met the change."""

    def let_go(self) -> None:
        """Note whether the source has changed; from now on it may."""
        if self.source is not None:
            self.has_changed = version_of(self.source) != self.version
        self.source = None


@dataclass(frozen=True)
class KeptView:
    """A tensor that autograd keeps, as it lay in its storage."""

    stored: KeptTensor
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Wrapped:
    """A tensor that several ranks hold parts of, by what it is made of."""

    kind: type[Tensor]
    inner: dict[str, object]
    meaning: Any
    size: torch.Size
    stride: tuple[int, ...]


class KeptOwner(Protocol):
    """Who has the visits of all blocks; see `tonari.trainer.mesh.swap.Swap`."""

    def note(self, stored: KeptTensor) -> None: ...

    def begin_return(self, visit: "Visit") -> bool: ...

    def wait_for_coming(self, visit: "Visit") -> None: ...


@dataclass(eq=False)
class Visit:
    """One forward pass over a block, and what autograd keeps of it."""

    swap: KeptOwner
    lanes: Lanes
    staying: set[int]
    least_bytes: int
    stored: dict[tuple[int, int], KeptTensor] = field(default_factory=dict)
    mark: Any = None
    """Of the end of its copies: to the host, and later from it."""
    arriving: list[Tensor | None] = field(default_factory=list)
    """Kept until the computation has waited for it."""

    def pack(self, tensor: Tensor) -> object:
        """Copy what autograd is about to keep, each storage once."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
        if is_traceable_wrapper_subclass(tensor):
            names, meaning = tensor.__tensor_flatten__()
            given = {name: getattr(tensor, name) for name in names}
            inner = {
                name: self.pack(each) if isinstance(each, Tensor) else each  # or a mesh
                for name, each in given.items()
            }
            if all(inner[name] is each for name, each in given.items()):
                return tensor
            return Wrapped(type(tensor), inner, meaning, tensor.size(), tensor.stride())
        storage = tensor.untyped_storage()
        if (
            storage.nbytes() < self.least_bytes
            or storage_id(storage) in self.staying
            or tensor.device.type != self.lanes.device.type
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return tensor
        # Changed in place since, it is another
        key = storage_id(storage), version_of(tensor)
        with torch.no_grad():
            if key not in self.stored:
                here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                host = self.lanes.copy_out(here)
                self.stored[key] = KeptTensor(here, host, tensor.detach(), version_of(tensor))
                self.swap.note(self.stored[key])
        return KeptView(
            self.stored[key], tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape),
            tensor.stride(),
        )  # fmt: skip

    def unpack(self, packed: object) -> Tensor:
        """Give back what autograd kept, in memory that goes as autograd leaves it."""
        if isinstance(packed, Wrapped):
            inner = {
                name: self.unpack(each) if isinstance(each, Wrapped | KeptView) else each
                for name, each in packed.inner.items()
            }
            wrapped: Tensor = packed.kind.__tensor_unflatten__(  # type: ignore[attr-defined]
                inner, packed.meaning, packed.size, packed.stride
            )
            return wrapped
        if isinstance(packed, Tensor):
            return packed
        assert isinstance(packed, KeptView)
        self.bring_back()
        self.swap.wait_for_coming(self)
        if packed.stored.has_changed:
            raise RuntimeError(
                f"a block that swaps kept a tensor of {packed.size} for its backward pass, which "
                "was changed in place since; autograd refuses that of any block: change a copy, "
                "not the tensor"
            )
        here = packed.stored.here
        assert here is not None, "it has come back"
        with torch.no_grad():
            made = torch.empty(0, dtype=packed.dtype, device=here.device)
            return made.set_(here.untyped_storage(), packed.offset, packed.size, packed.stride)

    def end(self) -> None:
        """Mark the end of the forward pass."""
        self.mark = self.lanes.mark_out()

    def leave(self) -> None:
        """Have the computation wait until all is copied, and leave the device."""
        self.lanes.wait(self.mark)
        for each in self.stored.values():
            each.let_go()
            each.here = None

    def bring_back(self, *_: object) -> None:
        """Begin to bring all back, unless that has begun."""
        if not self.stored:
            return
        stored, self.stored = [*self.stored.values()], {}
        if not self.swap.begin_return(self):
            # What has not left stays, and must not be written on before it is copied
            self.lanes.wait(self.mark)
        with torch.no_grad():
            for each in stored:
                assert each.host is not None, "it comes back once"
                each.let_go()
                if each.here is None:
                    each.here = self.lanes.copy_back(each.host)
                each.host = None  # torch keeps it until it is copied
        self.mark = self.lanes.mark_back()
        self.arriving = [each.here for each in stored]

    def wait(self) -> None:
        """Have the computation wait until all is back."""
        self.lanes.wait(self.mark)
        self.arriving = []
