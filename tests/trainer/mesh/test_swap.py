"""Blocks that swap compute the same, keep little on the device, and leave nothing behind."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tests.trainer.mesh.tiny_models import SEQUENCE, VOCABULARY, batch_of, make, task_of
from tonari.oracle.record import Recorder
from tonari.trainer.mesh.parallelize import _shard, parallelize
from tonari.trainer.mesh.swap import NO_COPIES, Swap, device_bytes, swapped_blocks
from tonari.trainer.models import GPT, StagedModel, seeded

CPU = torch.device("cpu")
Gradients = dict[str, Tensor]
Lane = list[Callable[[], object]]


class LateLanes:
    """Stands in for a GPU's streams: what is copied is there when it is waited for, not before.

    What is copied must be kept until then: memory that is free may be another's.
    """

    on_gpu, device = False, CPU

    def __init__(self) -> None:
        self._out: Lane = []
        self._back: Lane = []
        self.num_back = 0

    def copy_out(self, source: Tensor) -> Tensor:
        return self._later(self._out, torch.empty(source.numel(), dtype=torch.uint8), source)

    def copy_back(self, host: Tensor) -> Tensor:
        self.num_back += 1
        # torch keeps host memory until it is copied, and so does this
        target = torch.empty(host.numel(), dtype=torch.uint8)
        kept = weakref.ref(target)
        self._back.append(lambda: _alive(kept).copy_(host))
        return target.fill_(255)

    def _later(self, lane: Lane, target: Tensor, source: Tensor) -> Tensor:
        kept = weakref.ref(source)
        lane.append(lambda: target.copy_(_alive(kept)))
        return target.fill_(255)

    def mark_out(self) -> tuple[Lane, int]:
        return self._out, len(self._out)

    def mark_back(self) -> tuple[Lane, int]:
        return self._back, len(self._back)

    def wait(self, mark: tuple[Lane, int]) -> None:
        lane, end = mark
        for number in range(end):
            lane[number]()
            lane[number] = lambda: None


def _alive(kept: "weakref.ref[Tensor]") -> Tensor:
    found = kept()
    assert found is not None, "freed before it was copied"
    return found


def swapping(count: int, *, late: bool = True) -> Swap:
    swap = Swap(count, CPU, least_bytes=0)
    if late:
        swap._lanes = LateLanes()  # type: ignore[assignment]
    return swap


def step(kind: str, mesh: DeviceMesh, swap: Swap | None = None, **options: object) -> Gradients:
    task, batch = task_of(kind), batch_of(kind)
    (part,) = parallelize(make(kind), mesh, swap=swap, **options)  # type: ignore[arg-type]
    losses = task.losses(part(task.input(batch)), task.target(batch))
    (losses * batch["weight"]).mean().backward()
    return {name: p.grad for name, p in part.named_parameters() if p.grad is not None}


def same(found: Gradients, expected: Gradients) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("kind", ["gpt", "llama", "resnet", "cnn"])
def test_gradients_are_those_without_swapping_bit_for_bit(kind, mesh):
    expected = step(kind, mesh)
    for count in (1, 2, 3, 9):
        for late in (False, True):
            swap = swapping(count, late=late)
            assert same(step(kind, mesh, swap), expected), count
            assert swap.host_bytes == swap.device_bytes == 0
    for checkpointing in ("full", "selective"):
        for blocks in (0, 1):
            options: dict[str, Any] = {
                "checkpointing": checkpointing,
                "checkpointing_blocks": blocks,
            }
            plain, found = step(kind, mesh, **options), step(kind, mesh, swapping(1), **options)
            assert same(found, plain)


class OddLayers(nn.Module):
    """A block that does to its tensors what a keeper of tensors may stumble over."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        """Views of one storage, in-place changes, drawing, a buffer and a mask."""
        one, two, three = self.up(self.norm(values)).chunk(3, dim=-1)
        mixed = torch.relu_(one * self.scale) * two.exp().expand(2, *two.shape)
        mixed = self.dropout(mixed.sum(0)) * three.transpose(0, 1).contiguous().transpose(0, 1)
        filled = torch.zeros_like(values)
        filled[:, ::2] = self.down(mixed)[:, ::2]
        return values + filled.where(mask, -filled.square())


def odd_blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(4)
    return [OddLayers(16).double() for _ in range(count)]


def walk(blocks: list[nn.Module], values: Tensor) -> Tensor:
    mask = torch.arange(16) % 3 > 0
    for block in blocks:
        values = block(values, mask)
    return values


# Microbatches as they go forward (+) and back (-), as schedules of pipelines have them
ORDERS = {
    "alone": "+0 -0 +1 -1 +2 -2 +3 -3", "1f1b": "+0 +1 +2 -0 +3 -1 -2 -3",
    "gpipe": "+0 +1 +2 +3 -0 -1 -2 -3", "turned": "+0 +1 +2 +3 -3 -2 -1 -0",
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 3, 6])
def test_microbatches_go_as_a_schedule_has_them(order, count):
    def run(swap: Swap | None) -> tuple[list[Tensor], int]:
        blocks, lost = odd_blocks(6), {}
        if swap is not None:
            swap.attach(blocks)
        most = 0
        for word in ORDERS[order].split():
            if word[0] == "+":
                torch.manual_seed(int(word[1]))
                values = torch.randn(4, 16, dtype=torch.float64)
                lost[word[1]] = walk(blocks, values.requires_grad_()).square().sum()
            else:
                lost.pop(word[1]).backward()
            most = max(most, 0 if swap is None else swap.device_bytes)
        return [p.grad for block in blocks for p in block.parameters() if p.grad is not None], most

    expected, _ = run(None)
    swap = swapping(count)
    found, most = run(swap)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    assert swap.host_bytes == swap.device_bytes == 0
    one = swapping(1)
    (block,) = odd_blocks(1)
    one.attach([block])
    kept = walk([block], torch.ones(4, 16, dtype=torch.float64, requires_grad=True))
    # Beside what is used, what comes back for the block before
    assert 0 < most <= 2 * one.device_bytes
    del kept


def test_a_second_way_back_finds_what_the_first_one_found():
    blocks = odd_blocks(4)
    swap = swapping(4)
    swap.attach(blocks)
    for block in blocks:
        block.eval()
    lost = walk(blocks, torch.ones(4, 16, dtype=torch.float64, requires_grad=True)).sum()
    lost.backward(retain_graph=True)
    once = [p.grad.clone() for block in blocks for p in block.parameters() if p.grad is not None]
    lost.backward()
    twice = [p.grad for block in blocks for p in block.parameters() if p.grad is not None]
    assert all(torch.equal(2 * one, two) for one, two in zip(once, twice, strict=True))
    del lost
    assert swap.host_bytes == swap.device_bytes == 0


class Changing(nn.Module):
    """Changes in place what it has kept, and keeps it again."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        """Of the gradients autograd finds the second one alone."""
        values = one.exp().detach()
        first = values * one
        values.add_(1)
        return first + values * two


@pytest.mark.parametrize("others", [0, 3])
def test_what_is_changed_in_place_is_refused_as_autograd_refuses_it(others):
    one, two = (torch.full((4,), each, requires_grad=True) for each in (0.5, 2.0))
    for number, swaps in itertools.product((0, 1), (False, True)):
        blocks = [Changing(), *odd_blocks(others)]
        if swaps:
            swapping(9).attach(blocks)
        result = blocks[0](one, two)
        # Of passes that come later, those before leave
        walk(blocks[1:], torch.ones(4, 16, dtype=torch.float64, requires_grad=True))
        if number == 0:
            words = "change a copy" if swaps else "modified by an inplace operation"
            with pytest.raises(RuntimeError, match=words):
                torch.autograd.grad(result.sum(), one)
        else:
            (found,) = torch.autograd.grad(result.sum(), two)
            assert torch.equal(found, one.exp() + 1)


def test_a_pass_that_nobody_goes_back_over_leaves_with_the_next_ones():
    blocks = odd_blocks(4)
    swap = swapping(4)
    swap.attach(blocks)
    values = torch.ones(4, 16, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        walk(blocks, values)
    assert swap.host_bytes == 0
    for _ in range(3):
        result = walk(blocks, values)
        kept = swap.device_bytes, swap.host_bytes
        assert kept[1] == 2 * kept[0] > 0
    result.sum().backward()
    del result
    assert swap.host_bytes == swap.device_bytes == 0


def test_weights_and_what_all_blocks_are_given_stay_where_they_are():
    (block,) = odd_blocks(1)
    values = torch.randn(4, 16, dtype=torch.float64, requires_grad=True)
    swap = swapping(1)
    swap.attach([block])
    result = block(values, torch.ones(4, 16, dtype=torch.bool))
    stored = {
        each.here.untyped_storage().data_ptr() for each in swap._stored if each.here is not None
    }
    given = [*block.parameters(), *block.buffers()]
    assert not stored & {tensor.untyped_storage().data_ptr() for tensor in given}
    assert values.untyped_storage().data_ptr() in stored
    del result


@pytest.mark.parametrize("is_sharded", [True, False])
def test_weights_in_bfloat16_stay_where_they_are(mesh, is_sharded):
    swap = swapping(3, late=False)
    if is_sharded:  # as on several ranks
        (part,) = parallelize(make("gpt"), mesh, swap=swap)
        _shard(part, mesh, dtype="bfloat16", offload=False, by_block=True)
    else:
        (part,) = parallelize(make("gpt"), mesh, swap=swap, dtype="bfloat16")
    assert isinstance(part, FSDPModule) == is_sharded
    gathered: set[int] = set()

    def note(module: nn.Module, given: object, result: object) -> None:
        assert all(each.dtype == torch.bfloat16 for each in module.parameters())
        gathered.update(each.untyped_storage().data_ptr() for each in module.parameters())

    for layer in part.blocks.modules():
        layer.register_forward_hook(note)
    result = part(task_of("gpt").input(batch_of("gpt")))
    stored = [each.here for each in swap._stored if each.here is not None]
    assert len(stored) > 10
    assert gathered
    assert not gathered & {each.untyped_storage().data_ptr() for each in stored}
    result.sum().backward()
    assert swap.host_bytes == swap.device_bytes == 0


def test_the_memory_at_the_end_of_the_forward_pass_falls(mesh):
    def live_bytes(swap: Swap | None) -> int:
        task, batch = task_of("gpt"), batch_of("gpt")
        (part,) = parallelize(deep(), mesh, swap=swap)
        with Recorder() as recorder:
            result = part(task.input(batch))
            live = recorder.live_bytes
            result.sum().backward()
        return live

    def deep() -> StagedModel:
        return seeded(lambda: GPT(VOCABULARY, SEQUENCE, width=16, depth=6, heads=4), seed=0)

    class Elsewhere(LateLanes):
        """Copies lie where the recorder does not see them."""

        def __init__(self) -> None:
            super().__init__()
            self.host: dict[int, np.ndarray[Any, Any]] = {}

        def copy_out(self, source: Tensor) -> Tensor:
            stub = torch.empty(0)
            self.host[id(stub)] = np.array(source.numpy())
            return stub

        def copy_back(self, host: Tensor) -> Tensor:
            return torch.from_numpy(self.host.pop(id(host)))

    swaps: dict[int, Swap | None] = {0: None, NO_COPIES: Swap(6, CPU, least_bytes=NO_COPIES)}
    for count in (3, 6):
        swap = swaps[count] = swapping(count)
        swap._lanes = Elsewhere()  # type: ignore[assignment]
    found = {count: live_bytes(swap) for count, swap in swaps.items()}
    assert found[NO_COPIES] == found[0]
    (whole,) = parallelize(deep(), mesh)
    values = [task_of("gpt").input(batch_of("gpt"))]
    _, most = device_bytes(whole, [*whole.blocks.values()], values)
    assert most > 0
    for count in (3, 6):
        assert found[0] - found[count] == pytest.approx((count - 2) * most, rel=0.1)


@given(st.integers(1, 40), st.integers(0, 50))
def test_blocks_that_swap_are_spread_evenly_from_the_first_on(num_blocks, count):
    chosen = swapped_blocks(range(7, 7 + num_blocks), count)
    assert len(chosen) == len(set(chosen)) == min(count, num_blocks)
    if chosen:
        ends = [*chosen, 7 + num_blocks]
        gaps = {after - before for before, after in itertools.pairwise(ends)}
        assert chosen[0] == 7
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_gradients_are_the_same_and_the_most_memory_falls():
    device = torch.device("cuda", 0)

    def run(count: int) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
            for _ in range(12)
        ]
        if count:
            Swap(count, device).attach(blocks)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            values = torch.ones(4096, 1024, device=device, requires_grad=True)
            for block in blocks:
                values = values + block(values)
            values.square().mean().backward()
        torch.cuda.synchronize()
        gradients = [p.grad for block in blocks for p in block.parameters() if p.grad is not None]
        # Kept elsewhere: they would count in the next run.
        return [grad.cpu() for grad in gradients], torch.cuda.max_memory_allocated()

    expected, whole_bytes = run(0)
    for count in (4, 12):
        found, most_bytes = run(count)
        assert all(map(torch.equal, found, expected))
        assert most_bytes < whole_bytes - (count - 3) * 4096 * 4096 * 4
