"""outcome reads each row alone: right or not, and the probability of its largest class."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from importance import outcome

# Probabilities 1/2, 1/4, 1/4 and 1/8, 3/4, 1/8.
LOGITS = torch.tensor([[2.0, 1.0, 1.0], [1.0, 6.0, 1.0]]).log()
LABELS = torch.tensor([0, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_outcome_of_a_batch_worked_by_hand(dtype: torch.dtype) -> None:
    correct, confidence = outcome(LOGITS.to(dtype), LABELS)
    assert correct.tolist() == [True, False]
    assert correct.dtype == torch.bool
    assert confidence.dtype == torch.float32
    rounding = 1e-6 if dtype.itemsize >= 4 else 1e-2
    assert confidence.tolist() == pytest.approx([0.5, 0.75], abs=rounding)


def test_confidence_is_a_softmax_over_classes_and_not_over_the_batch() -> None:
    # Two sure rows of one class: over the batch each would hold half of it.
    _, confidence = outcome(torch.tensor([[9.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0]))
    assert (confidence > 0.99).all()
    # A lone unsure row: over the batch it would hold all of its class.
    _, confidence = outcome(torch.zeros(1, 4), torch.tensor([0]))
    assert confidence.tolist() == [0.25]


@settings(deadline=None)  # The first call into torch is slow.
@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 1000))
def test_outcome_of_a_row_is_the_same_in_any_batch(batch: int, classes: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(batch, classes, generator=draw)
    labels = torch.randint(classes, (batch,), generator=draw)
    correct, confidence = outcome(logits, labels)
    alone = [outcome(logits[row : row + 1], labels[row : row + 1]) for row in range(batch)]
    torch.testing.assert_close(correct, torch.cat([right for right, _ in alone]))
    torch.testing.assert_close(confidence, torch.cat([sure for _, sure in alone]))
    assert ((confidence >= 1 / classes - 1e-6) & (confidence <= 1 + 1e-6)).all()


def test_half_precision_is_summed_in_float32() -> None:
    # 1/300, whose nearest bfloat16 is 0.16 % away.
    _, confidence = outcome(torch.zeros(1, 300, dtype=torch.bfloat16), torch.tensor([0]))
    assert confidence.item() == pytest.approx(1 / 300, rel=1e-5)


def test_outcome_of_more_logits_than_are_taken_at_a_time_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, generator=draw)
    labels = torch.randint(5, (7,), generator=draw)
    expected = outcome(logits, labels)
    for most in (1, 5, 14, 30):
        monkeypatch.setattr(sys.modules["importance.outcome"], "MOST_NUMBERS", most)
        assert all(map(torch.equal, outcome(logits, labels), expected))


def test_float64_logits_beyond_float32_are_read_as_they_are() -> None:
    correct, confidence = outcome(torch.tensor([[1e300, -1e300]], dtype=torch.float64), LABELS[:1])
    assert correct.item()
    assert confidence.item() == 1.0


def test_no_gradient_graph_is_kept() -> None:
    logits = LOGITS.clone().requires_grad_()
    correct, confidence = outcome(logits * 2, LABELS)
    assert not correct.requires_grad
    assert not confidence.requires_grad
    assert confidence.grad_fn is None


def test_an_empty_batch_has_an_empty_outcome() -> None:
    correct, confidence = outcome(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert (correct.shape, confidence.shape) == ((0,), (0,))


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(4), LABELS, r"logits have shape \(4,\), expected \[batch, classes\].*flatten"),
        (torch.zeros(2, 0), LABELS, r"logits have shape \(2, 0\), expected .*at least one class"),
        (torch.zeros(3, 2), LABELS, r"int64\[2\], expected integers of shape \[3\].*class numbers"),
        (LOGITS, LABELS[:, None], r"int64\[2, 1\], expected integers of shape \[2\]"),
        (LOGITS, torch.zeros(2), r"float32\[2\], expected integers .* not one-hot or mixed"),
        (LOGITS, torch.zeros(2, dtype=torch.bool), r"bool\[2\], expected integers"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(
    logits: torch.Tensor, labels: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        outcome(logits, labels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_outcome_stays_on_the_device_of_the_logits() -> None:
    correct, confidence = outcome(LOGITS.cuda(), LABELS.cuda())
    assert (correct.device.type, confidence.device.type) == ("cuda", "cuda")
    assert correct.tolist() == [True, False]
