"""Branches on several ranks: losses, gradients and weights are those of one process."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.studies.tiles import played
from tests.docs.blocks import blocks_of
from tests.multirank import ROOT, RunRanks
from tests.ranks.trainer.branches import CASES, ROWS, make, train
from tonari.trainer.mesh.branches import Branches, Join, clip_grad_norm, deal


@pytest.mark.multirank
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_with_branches_equal_one_process(run_ranks: RunRanks, tmp_path, num_ranks) -> None:
    """One start of ranks for all cases."""
    torch.manual_seed(1)
    models = {case: make(case) for case in CASES}
    begin = {case: {k: v.clone() for k, v in m.state_dict().items()} for case, m in models.items()}
    torch.save(begin, tmp_path / "begin.pt")
    expected = {case: train(model, begin[case]) for case, model in models.items()}
    ended = run_ranks("trainer/branches", num_ranks, str(tmp_path / "begin.pt"), timeout_s=240)
    reports = [
        torch.load(ended.directory / f"{rank}.pt", weights_only=True) for rank in range(num_ranks)
    ]
    for case in CASES:
        found = [report[case] for report in reports]
        for part in found:
            close(part.pop("whole"), models[case].state_dict())
        if case == "towers" and num_ranks == 4:
            for rank, part in enumerate(found):
                share = slice(rank // 2 * ROWS // 2, (rank // 2 + 1) * ROWS // 2)
                for step in range(2):
                    wanted = expected[case][f"{step} losses"][share]
                    torch.testing.assert_close(
                        part.pop(f"{step} losses"), wanted, rtol=1e-9, atol=0
                    )
            expected[case] = {k: v for k, v in expected[case].items() if "losses" not in k}
        assert {name for part in found for name in part} == {*expected[case]}
        for part in found:
            close(part, {name: expected[case][name] for name in part})
        alone = {name for name in expected[case] if any(name not in part for part in found)}
        parameters = [name for name, _ in models[case].named_parameters()]
        assert {name for name in parameters if name in alone} == {
            name for name in parameters if name.startswith(("cell.", "towers."))
        }, "each rank has its own branches alone, and all of what is outside"


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_branches_are_dealt_by_cost() -> None:
    assert deal([1, 5, 3, 3], 2) == [0, 0, 1, 1]
    assert deal([1, 2], 4) == [1, 0]
    assert sorted(deal([0, 0, 0], 3)) == [0, 1, 2]


def test_alone_it_is_the_list_of_branches() -> None:
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    x = torch.randn(5, 3)
    whole = Branches(layers)
    assert whole.state_dict().keys() == nn.ModuleList(layers).state_dict().keys()
    assert whole(x).equal(layers[0](x) + layers[1](x))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*2\.weight"):
        whole.load_state_dict(whole.state_dict() | {"2.weight": torch.ones(1)})


def test_a_norm_without_branches_is_torchs() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    expected = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert clip_grad_norm(model, 0.5).item() == pytest.approx(expected.item())
    assert nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ).item() == pytest.approx(0.5)


def test_the_page_is_true_in_one_process() -> None:
    given: dict[str, Any] = {}
    for block in blocks_of(ROOT / "docs/branches.md"):
        exec(compile(block.text, "docs/branches.md", "exec"), given)
    model = given["model"]
    assert model(torch.randn(2, 3, 6, 6)).shape == (2, 10)
    assert given["whole_state"](model).keys() == model.state_dict().keys()


@pytest.mark.parametrize("given", [{"branches": []}, {"costs": [1.0]}, {"join": "mean"}], ids=str)
def test_what_is_no_block_is_refused(given) -> None:
    with pytest.raises(ValueError, match="expected one branch or more, as many costs"):
        Branches(**{"branches": [nn.Identity(), nn.Identity()]} | given)


@pytest.fixture
def alone(tmp_path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_rank_whose_branches_need_no_gradient_goes_back(alone) -> None:
    for join in get_args(Join):
        output = Branches([nn.Identity()], join=join)(torch.ones(2, 3))
        (output[0] if join == "list" else output).sum().backward()


def test_an_output_that_is_not_used_has_no_gradient(alone) -> None:
    model = Branches([nn.Linear(3, 2), nn.Linear(3, 2)], join="list")
    model(torch.ones(2, 3))[0].sum().backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]


@pytest.mark.parametrize(
    ("branch", "inputs", "found"),
    [
        (nn.Identity(), [[torch.ones(2, requires_grad=True)]], "none in lists and dicts that"),
        (nn.Identity(), [], "a tensor at least"),
        (nn.MaxPool1d(2, return_indices=True), [torch.ones(1, 1, 2)], r"\[0\] return \['tuple'\]"),
        (nn.Identity(), [torch.ones(1).int()], r"\['torch.int32'\], expected one tensor of float"),
    ],
    ids=str,
)
def test_what_branches_cannot_share_is_refused(alone, branch, inputs, found) -> None:
    with pytest.raises(ValueError, match=found):
        Branches([branch])(*inputs)


def test_branches_in_branches_of_the_same_ranks_are_refused() -> None:
    with played(2, 0):
        inner = Branches([nn.Identity(), nn.Identity()])
        with pytest.raises(ValueError, match="has Branches of the same ranks in it, expected none"):
            Branches([nn.Sequential(inner)])
