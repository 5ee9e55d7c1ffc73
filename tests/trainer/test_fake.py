"""Tensors without data have the shapes that torch computes, and nothing is written of failures."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tonari.trainer.models.fake import fake_tensors

GROUPS = torch.tensor([3, 3, 9, 12], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right", "groups"),
    [((12, 16), (4, 16, 8), GROUPS), ((4, 12, 16), (4, 16, 8), None)],
    ids=["rows in groups", "a product for each group"],
)
def test_a_product_by_groups_is_known_in_any_dtype(
    left: tuple[int, ...], right: tuple[int, ...], groups: Tensor | None, dtype: torch.dtype
) -> None:
    # Its way back has the product of two matrices whose inner dimension lies in groups.
    given = [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in (left, right)]

    def seen(given: Sequence[Tensor], groups: Tensor | None) -> list[Any]:
        with FlopCounterMode(display=False) as counter:
            made = torch.nn.functional.grouped_mm(*given, offs=groups)
            results = [made, *torch.autograd.grad((made * made).sum(), given)]
        shapes = [(each.shape, each.stride(), each.dtype) for each in results]
        return [*shapes, counter.get_total_flops()]

    expected = seen(given, groups)
    num_products = 1 if groups is not None else 4
    assert expected[-1] == 3 * 2 * num_products * 12 * 16 * 8  # one there, two on the way back
    with fake_tensors() as mode:
        fakes = [mode.from_tensor(each) for each in given]
        assert seen(fakes, None if groups is None else mode.from_tensor(groups)) == expected


def test_what_cannot_be_computed_raises_and_leaves_no_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    with fake_tensors(), pytest.raises(RuntimeError):
        torch.empty(2, 3, device="cpu") @ torch.empty(2, 3, device="cpu")
    with fake_tensors(), pytest.raises(RuntimeError):
        torch.nn.functional.grouped_mm(torch.empty(2), torch.empty(2))
    assert not [each for each in caplog.records if each.name.startswith("torch")]
