"""What a step tells of its rows arrives whole, in order, and only where it belongs."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dataio.state.report
from dataio import Loader, Reports, Workers
from dataio.plan.history import COLUMNS, score_dtype, unscored
from dataio.state.report import Feedback
from dataio.store.pool import Pool
from dataio.world import run_threads, single_world, thread_worlds
from importance import Full, Kakurenbo, outcome
from tests.gpu import no_synchronisation
from tests.memory_source import FIELDS, MemorySource

KEPT = Full(columns=COLUMNS)
DEFAULTS: dict[str, Any] = {
    "batch_size": 5, "fields": FIELDS, "seed": 7, "importance": KEPT,
    "workers": Workers(threads=0), "reports": Reports(progress=False),
}  # fmt: skip


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def on_gpu(values: Any, **options: Any) -> torch.Tensor:
    return torch.as_tensor(values, **options).as_subclass(OnGpu)


class FakeEvent:
    """Done when somebody waits for it, or when the test says so."""

    def __init__(self, sent: torch.Tensor, packed: torch.Tensor) -> None:
        self._sent, self._packed = sent, packed
        self.done = False
        self.num_waits = 0

    def finish(self) -> None:
        self.done = True
        self._sent.copy_(self._packed)

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.num_waits += not self.done
        self.finish()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    """Copies to the host that are under way: until one is done its memory holds rubbish."""
    events: list[FakeEvent] = []

    def send(columns):
        packed = torch.stack([value.as_subclass(torch.Tensor).double() for value in columns])
        sent = torch.full_like(packed, 3.0)
        events.append(FakeEvent(sent, packed.clone()))
        return sent, events[-1]

    monkeypatch.setattr(dataio.state.report, "_send", send)
    return events


def make_feedback(num_slots: int = 8) -> tuple[Feedback, Any]:
    scores = unscored(num_slots, score_dtype(COLUMNS))
    return Feedback(scores, np.arange(num_slots).__getitem__), scores


def tell(feedback, slots, loss, correct=None, confidence=None, *, epoch=1):
    slots = slots if isinstance(slots, torch.Tensor) else torch.as_tensor(slots)
    loss = loss if isinstance(loss, torch.Tensor) else torch.as_tensor(loss)
    feedback.add(slots, slots, loss, correct, confidence, epoch=epoch)


@pytest.fixture
def written_at_once(monkeypatch):
    monkeypatch.setattr("dataio.state.report.STEPS_AT_ONCE", 1)


def test_reports_written_some_at_a_time_leave_what_each_by_itself_leaves(monkeypatch):
    rng, left = np.random.default_rng(0), {}
    steps = [
        (rng.integers(-1, 40, 7) if step % 9 == 8 else rng.permutation(40)[:7] - step % 2,
         rng.normal(size=7), rng.random(7) < 0.5, None if step % 11 == 5 else rng.random(7))
        for step in range(150)
    ]  # fmt: skip
    for at_once in (1, 16):
        monkeypatch.setattr("dataio.state.report.STEPS_AT_ONCE", at_once)
        feedback, scores = make_feedback(40)
        for number, told in enumerate(steps):
            slots, loss, correct = (torch.as_tensor(part) for part in told[:3])
            confidence = None if told[3] is None else torch.as_tensor(told[3])
            feedback.add(slots, slots, loss, correct, confidence, epoch=number // 50)
        feedback.flush()
        left[at_once] = scores.tobytes()
    assert left[1] == left[16]


def test_a_report_from_a_gpu_is_written_once_it_has_arrived_and_nobody_waits(gpu, written_at_once):
    feedback, scores = make_feedback()
    tell(feedback, on_gpu([0, 1]), on_gpu([0.5, 1.5]))
    tell(feedback, on_gpu([2, 3]), on_gpu([2.5, 3.5]))
    assert (scores["epoch"] == -1).all()
    gpu[0].finish()
    tell(feedback, on_gpu([4, 5]), on_gpu([4.5, 5.5]))
    assert scores["loss"][:2].tolist() == [0.5, 1.5]
    assert (scores["epoch"][2:] == -1).all()
    assert [event.num_waits for event in gpu] == [0, 0, 0]


def test_settling_writes_all_that_is_under_way(gpu):
    feedback, scores = make_feedback()
    for step in range(4):
        tell(feedback, on_gpu([2 * step, 2 * step + 1]), on_gpu([step + 0.25, step + 0.75]))
    feedback.flush()
    assert scores["loss"].tolist() == [0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75]
    feedback.flush()
    assert [event.num_waits for event in gpu] == [1, 1, 1, 1]


def test_reports_of_a_row_are_written_in_the_order_in_which_they_were_made(gpu):
    feedback, scores = make_feedback()
    right, wrong = torch.tensor([True]), torch.tensor([False])
    tell(feedback, on_gpu([3]), on_gpu([1.0]), right.as_subclass(OnGpu))
    tell(feedback, on_gpu([3]), on_gpu([2.0]), wrong.as_subclass(OnGpu))
    gpu[1].finish()
    tell(feedback, [3], [3.0], right)
    assert scores["epoch"][3] == -1, "the first is still under way"
    feedback.flush()
    assert scores["loss"][3] == 3.0
    assert scores["correct"][3]
    assert scores["forgotten"][3] == 1


def test_what_the_caller_writes_over_meanwhile_is_not_taken_for_the_report(gpu):
    feedback, scores = make_feedback()
    slots, confidence = torch.tensor([1, 2]), torch.tensor([0.25, 0.75])
    tell(feedback, slots, on_gpu([1.0, 2.0]), confidence=confidence)
    later = torch.tensor([0.5])
    tell(feedback, [5], later)
    slots.fill_(0)
    confidence.fill_(0)
    later.fill_(9)
    feedback.flush()
    assert scores["confidence"][:3].tolist() == [0, 0.25, 0.75]
    assert scores["loss"][5] == 0.5


SIDES: dict[str, Callable[..., torch.Tensor]] = {"host": torch.as_tensor, "gpu": on_gpu}


@pytest.mark.parametrize("slot_side", SIDES)
@pytest.mark.parametrize("loss_side", SIDES)
@pytest.mark.parametrize("outcome_side", SIDES)
def test_each_value_may_be_on_the_host_or_on_the_gpu(gpu, slot_side, loss_side, outcome_side):
    feedback, scores = make_feedback(2**20)
    feedback.add(
        SIDES[slot_side]([2**20 - 1, -1, 6]),
        SIDES[slot_side]([2**20 - 1, -1, 6]),
        SIDES[loss_side]([0.5, 7.0, 1.5]).requires_grad_(),
        SIDES[outcome_side]([True, True, False]),
        SIDES[outcome_side]([0.75, 1.0, 0.25]),
        epoch=4,
    )
    feedback.flush()
    told = scores[[2**20 - 1, 6]]
    assert told["loss"].tolist() == [0.5, 1.5]
    assert told["correct"].tolist() == [True, False]
    assert told["confidence"].tolist() == [0.75, 0.25]
    assert np.flatnonzero(scores["epoch"] == 4).tolist() == [6, 2**20 - 1], "padding is no row"
    assert len(gpu) == ("gpu" in (slot_side, loss_side, outcome_side)), "one copy a step"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_losses_of_any_precision_are_taken(gpu, side, dtype):
    feedback, scores = make_feedback(5)
    loss = SIDES[side]([float("nan"), float("inf"), -float("inf"), 0.5, -0.0], dtype=dtype)
    tell(feedback, [0, 1, 2, 3, 4], loss)
    feedback.flush()
    assert scores["loss"].tolist() == [np.inf, np.inf, -np.inf, 0.5, 0.0]
    assert not np.signbit(scores["loss"][4])


@pytest.mark.parametrize("side", SIDES)
def test_a_confidence_that_is_not_a_number_counts_as_unsure(gpu, side):
    """As of a model that diverged: whoever ranks rows by it relies on numbers."""
    feedback, scores = make_feedback(2)
    confidence = SIDES[side]([float("nan"), 0.5])
    tell(feedback, torch.arange(2), torch.ones(2), None, confidence, epoch=0)
    feedback.flush()
    assert scores["confidence"].tolist() == [0, 0.5]


@pytest.mark.parametrize("side", SIDES)
def test_a_loss_that_float32_does_not_hold_is_infinite_and_no_warning(gpu, side):
    feedback, scores = make_feedback(3)
    tell(feedback, [0, 1, 2], SIDES[side]([1e300, 1e38, -1e300], dtype=torch.float64))
    feedback.flush()
    assert scores["loss"].tolist() == [np.inf, np.inf, -np.inf]


@pytest.mark.parametrize("side", SIDES)
def test_an_outcome_that_nobody_told_counts_as_wrong_and_unsure(gpu, side):
    feedback, scores = make_feedback(2)
    tell(feedback, [0, 1], SIDES[side]([1.0, 2.0]), torch.tensor([True, True]), torch.ones(2))
    tell(feedback, [0, 1], SIDES[side]([1.0, 2.0]))
    feedback.flush()
    assert scores["correct"].tolist() == [False, False]
    assert scores["confidence"].tolist() == [0, 0]
    assert scores["forgotten"].tolist() == [1, 1]


def losses(loader: Loader) -> list[float]:
    """Last losses by sample."""
    by_sample = np.argsort(loader._session.pool.sample_ids)
    return list(loader._session.pool.scores["loss"][by_sample].tolist())


def report(loader: Loader, batch: Any, plus: float = 0.0) -> None:
    loader.report(batch, on_gpu(batch["sample_id"].float() + plus))


def test_no_report_is_lost_at_a_turn_at_the_end_or_in_what_is_saved(tmp_path, gpu):
    expected = [float(sample) for sample in range(31)]
    with Loader(MemorySource(31), cache=tmp_path / "a", world=single_world(), **DEFAULTS) as loader:
        for epoch in loader.epochs(3):
            if epoch > 0:
                assert losses(loader) == [sample + epoch - 1 for sample in expected]
            for batch in loader:
                report(loader, batch, epoch)
            if epoch == 1:
                loader.save(tmp_path / "saved")
        assert losses(loader) == [sample + 2 for sample in expected]
    with Loader(MemorySource(31), cache=tmp_path / "a", world=single_world(), **DEFAULTS) as loader:
        loader.restore(tmp_path / "saved")
        assert losses(loader) == [sample + 1 for sample in expected]


@pytest.mark.parametrize("leave", ["restore", "load_state_dict", "set_epoch"])
def test_what_an_abandoned_epoch_still_has_under_way_is_in_no_later_score(
    tmp_path, gpu, leave, written_at_once
):
    with Loader(MemorySource(31), cache=tmp_path / "a", world=single_world(), **DEFAULTS) as loader:
        loader.save(tmp_path / "saved")
        state = loader.state_dict()
        batches = iter(loader)
        report(loader, next(batches))
        gpu[0].finish()
        report(loader, next(batches))
        assert np.isfinite(losses(loader)).sum() == 5, "one was written, one is under way"
        argument = {"restore": tmp_path / "saved", "load_state_dict": state, "set_epoch": 5}[leave]
        getattr(loader, leave)(argument)
        for batch in loader:
            tell_later = batch
        assert np.isinf(losses(loader)).all()
        loader.report(tell_later, torch.ones(5))
        assert np.isfinite(losses(loader)).any()
    assert [event.num_waits for event in gpu] == [0, 0], "nor does anybody wait for it"


def test_a_rank_that_still_reports_does_not_reach_scores_that_its_neighbour_cleared(
    tmp_path, monkeypatch, written_at_once
):
    rank_0_left = threading.Event()
    ensure = Pool.ensure

    def watched(pool, placement, **options):
        if pool.world.rank == 0 and pool.scores["epoch"].max() >= 0:
            rank_0_left.set()
        ensure(pool, placement, **options)

    def job(world):
        with Loader(MemorySource(31), cache=tmp_path / "a", world=world, **DEFAULTS) as loader:
            batches = iter(loader)
            loader.report(next(batches), torch.ones(5))
            batch = next(batches)
            world.barrier(doing="have reported")
            if world.rank == 1:
                # Rank 0 has come as far as it can without this one.
                assert rank_0_left.wait(20)
                loader.report(batch, torch.ones(5))
            loader.set_epoch(5)
            return losses(loader)

    monkeypatch.setattr(Pool, "ensure", watched)
    for found in run_threads(thread_worlds([2]), job):
        assert np.isinf(found).all()


def test_closing_waits_for_no_report(tmp_path, gpu):
    with Loader(MemorySource(31), cache=tmp_path / "a", world=single_world(), **DEFAULTS) as loader:
        report(loader, next(iter(loader)))
    assert gpu[0].num_waits == 0


@pytest.mark.gpu
def test_a_step_on_a_gpu_reports_without_a_synchronisation(tmp_path):
    device = torch.device("cuda")
    policy = Kakurenbo(0.3, drops=(), alphas=(1.0,))
    options = DEFAULTS | {"importance": policy, "device": device}
    model = torch.nn.Linear(1, 10, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected: dict[int, tuple[float, bool, float]] = {}
    told: list[tuple[torch.Tensor, ...]] = []
    with Loader(MemorySource(61), cache=tmp_path, world=single_world(), **options) as loader:
        for _ in loader.epochs(1):
            for batch in loader:
                labels = batch["label"].long()
                logits = model(labels[:, None].float())
                loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
                (loss * batch["weight"]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with no_synchronisation():
                    correct, confidence = outcome(logits, labels)
                    loader.report(batch, loss, correct, confidence)
                told.append((batch["sample_id"], loss.detach(), correct, confidence))
        for sample, *values in (row for batch in told for row in zip(*batch, strict=True)):
            loss_, correct_, confidence_ = (value.item() for value in values)
            expected[int(sample)] = (loss_, bool(correct_), confidence_)
        scores, ids = loader._session.pool.scores, loader._session.pool.sample_ids
    assert sorted(set(expected) - {-1}) == list(range(61))
    for entry, sample in zip(scores, ids.tolist(), strict=True):
        loss_, correct_, confidence_ = expected[sample]
        assert entry["loss"] == pytest.approx(loss_, abs=1e-3)
        assert entry["confidence"] == pytest.approx(confidence_, abs=1e-3)
        assert entry["correct"] == correct_


def test_reports_of_steps_that_do_not_count_are_never_written():
    feedback, scores = make_feedback(64)
    feedback.upto = 17
    for step in range(1, 33):  # more than are written at once
        slots = torch.tensor([step])
        feedback.add(slots, slots, slots.float(), None, None, epoch=1, step=step)
    assert np.flatnonzero(scores["epoch"] == 1).tolist() == [*range(1, 18)]
    trained, none = np.arange(64) <= 20, np.zeros(64, np.bool_)
    feedback.settle(scores, np.arange(64), trained, none, epoch=1, steps=20)
    feedback.flush()
    assert np.flatnonzero(scores["epoch"] == 1).tolist() == [*range(1, 21)]


def test_of_a_row_that_comes_again_no_report_of_a_step_that_does_not_count_is_written():
    feedback, scores = make_feedback(4)
    feedback.upto = 2
    for step, slot in enumerate((0, 1, 0), 1):
        slots = torch.tensor([slot])
        feedback.add(slots, slots, torch.tensor([float(step)]), None, None, epoch=1, step=step)
    trained = np.array([True, True, False, False])
    feedback.settle(scores, np.arange(4), trained, np.arange(4) == 0, epoch=1, steps=2)
    assert scores["loss"][:2].tolist() == [1.0, 2.0]
