"""How rows are judged; split logits and sequences are in test_parallelize.py."""

import torch

from importance import outcome
from tonari.trainer.mesh.pipeline import Scored
from tonari.trainer.run.tasks import Classify, NextToken

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 1.0, 0.0]], dtype=torch.float64)


def test_images_are_judged_as_the_importance_policies_do() -> None:
    task = Classify(label="cls")
    target = task.target({"cls": torch.tensor([0, 1, 0], dtype=torch.int32)})
    for found, expected in zip(task.outcome(LOGITS, target), outcome(LOGITS, target), strict=True):
        assert torch.equal(found, expected)


def test_the_loss_of_a_sequence_is_the_mean_of_its_tokens() -> None:
    task, tokens = NextToken(), torch.tensor([[0, 0, 2, 1]], dtype=torch.uint8)
    assert task.input({"tokens": tokens}).tolist() == [[0, 0, 2]]
    target = task.target({"tokens": tokens})
    assert target.tolist() == [[0, 2, 1]]
    each = [-LOGITS[place].log_softmax(0)[token] for place, token in enumerate(target[0])]
    torch.testing.assert_close(task.losses(LOGITS[None], target), torch.stack(each).mean()[None])


def test_a_sequence_is_as_right_as_its_tokens_and_correct_if_most_of_them_are() -> None:
    task = NextToken()
    batch = torch.stack([LOGITS, LOGITS])
    right, confidence = task.outcome(batch, torch.tensor([[0, 2, 2], [0, 1, 2]]))
    torch.testing.assert_close(right, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    correct = Scored(right, right, confidence).correct
    assert correct is not None
    assert correct.tolist() == [True, False]
    expected = LOGITS.softmax(1).amax(1).mean().float()
    torch.testing.assert_close(confidence, expected.expand(2))


def test_half_precision_is_judged_in_single() -> None:
    assert Classify().losses(LOGITS.bfloat16(), torch.tensor([0, 1, 2])).dtype == torch.float32
