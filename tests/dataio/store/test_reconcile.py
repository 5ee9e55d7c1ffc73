"""What a node does to hold the rows wanted, whatever it holds: properties of the decision."""

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataio.plan.placement import Placement
from dataio.store.files.manifest import MISSING, Entries, empty_entries, join_entries, make_entries
from dataio.store.quota import Budget
from dataio.store.reconcile import FillingPlan, HeldRows, find_beyond, find_surplus, reconcile

SAMPLES = 24
MOST_SLOTS = 7
LENGTHS = np.array([3, 0, 5, 2])


def entries_of(ids):
    """Entries of slots that hold these samples: every sample lies in one place of its own."""
    ids = np.asarray(ids, np.int64)
    entries = empty_entries(len(ids), 1)
    slots = np.flatnonzero(ids != MISSING)
    here = ids[slots]
    entries.put(
        make_entries(
            slot=slots, sample_id=here, checksum=(here + 7).astype(np.uint64), position=here,
            heap=here % 2, offset=10 * here, lengths=LENGTHS[here % 4].reshape(-1, 1),
        )
    )  # fmt: skip
    return entries


def rows_of(entries: Entries):
    """Every column of entries, as lists."""
    return {name: column.tolist() for name, column in entries.columns().items()}


@dataclass
class LostRows:
    """What a node holds and what it is to hold; `kind` says how the two are related."""

    kind: str
    held: HeldRows
    wanted: Placement
    budget: Budget | None
    rows_move: bool
    may_exchange: bool

    def plan(self) -> FillingPlan:
        return reconcile(
            self.held, self.wanted, budget=self.budget, rows_move=self.rows_move,
            may_exchange=self.may_exchange,
        )  # fmt: skip

    def result(self) -> tuple[FillingPlan, Entries]:
        plan = self.plan()
        return plan, self.held.entries if plan.entries is None else plan.entries

    @property
    def whole_pool_may_stay(self) -> bool:
        return self.budget is None or (self.may_exchange and not self.held.num_missing)


@st.composite
def cases(draw, kinds=("same", "back", "same rows", "other"), budgets=True):
    num_slots = draw(st.integers(1, MOST_SLOTS))
    pick = st.permutations(range(SAMPLES))
    now = draw(pick)[:num_slots]
    has_before = draw(st.booleans())
    present = [True if has_before else draw(st.booleans()) for _ in now]
    entries = entries_of([i if p else MISSING for i, p in zip(now, present, strict=True)])
    # Some rows of the epoch before left, or lay elsewhere; those that left may be written over.
    former = draw(st.permutations([*now, *draw(pick)[:3]]))
    former = list(dict.fromkeys(former))[:num_slots]
    gone = [i not in now and draw(st.booleans()) for i in former]
    before = entries_of([MISSING if g else i for i, g in zip(former, gone, strict=True)])
    others = [i for i in draw(pick) if i not in now and i not in former]
    surplus = entries_of(others[: draw(st.integers(0, 4))])
    parts = [entries.take(entries.present), surplus]
    if has_before:
        parts.insert(1, before.take(before.present))
    held = HeldRows(
        entries, 3, "held", entries.count_missing(),
        before=before.copy if has_before else None, rows=lambda: join_entries(parts, 1),
        has_surplus=len(surplus) > 0, is_filled=False,
    )  # fmt: skip
    kind = draw(st.sampled_from(kinds))
    if kind == "back" and not has_before:
        kind = "other"
    name, epoch, ids = "other", draw(st.integers(0, 5)), draw(pick)[: draw(st.integers(1, 7))]
    if kind == "same":
        name, epoch, ids = "held", 3, now
    elif kind == "same rows":
        ids = now
    elif kind == "back":
        name, epoch, ids = "held", 2, former
    wanted = Placement(name, epoch, len(ids), lambda: np.array(ids, np.int64))
    budget = None
    if budgets and draw(st.booleans()):
        resident_rows = draw(st.integers(0, MOST_SLOTS))
        budget = Budget(
            1 << 20, num_slots, SAMPLES, 10 * SAMPLES, resident_rows,
            draw(st.integers(0, 10 * SAMPLES)), draw(st.booleans()), 4, 0,
        )  # fmt: skip
        held = replace(held, is_filled=kind == "same" and draw(st.booleans()))
    return LostRows(
        kind, held, wanted, budget, kind == "back" or draw(st.booleans()), draw(st.booleans())
    )


@given(cases())
def test_every_wanted_sample_is_in_its_slot_or_in_the_missing_list(case):
    plan, entries = case.result()
    wanted = case.wanted.sample_ids()
    ids, missing = entries.sample_id[:], plan.missing
    assert len(entries) == len(wanted)
    present = ids != MISSING
    assert np.array_equal(ids[present], wanted[present])
    assert np.array_equal(wanted[missing.slots], missing.sample_ids)
    assert not present[missing.slots].any()
    assert (np.diff(missing.slots) > 0).all()
    if case.budget is None:
        assert present.sum() + len(missing.slots) == len(wanted)


@given(cases())
def test_a_row_stays_where_it_lies(case):
    _, entries = case.result()
    assert rows_of(entries) == rows_of(entries_of(entries.sample_id[:]))


@given(cases())
def test_no_row_that_is_held_is_read_again(case):
    plan, _ = case.result()
    rows = case.held.rows()
    if not case.whole_pool_may_stay:
        assert case.budget is not None
        rows = case.held.entries.take(~find_beyond(case.held.entries, case.budget))
    assert not np.isin(plan.missing.sample_ids, rows.sample_id[:]).any()


@given(cases())
def test_nothing_is_kept_or_read_beyond_the_budget(case):
    plan, entries = case.result()
    if case.budget is None:
        return
    num_present = len(entries) - entries.count_missing()
    num_filled = num_present + len(plan.missing.slots)
    if len(plan.missing.slots):
        assert num_filled <= case.budget.resident_rows
    if not case.whole_pool_may_stay and (plan.change == "slots" or case.held.num_missing):
        assert not find_beyond(entries, case.budget).any()
    # As many as may stay are read, whole shards of them: the first samples.
    is_filled = case.held.is_filled and plan.entries is None
    if num_present <= case.budget.resident_rows and not is_filled:
        assert num_filled == min(len(entries), case.budget.resident_rows)
        left = np.setdiff1d(np.flatnonzero(~entries.present), plan.missing.slots)
        later = case.wanted.sample_ids()[left]
        assert later.min(initial=SAMPLES) > plan.missing.sample_ids.max(initial=-1)


@given(cases(kinds=("back",)))
def test_stepping_back_gives_the_former_epoch_exactly(case):
    if case.kind != "back":
        return
    plan, entries = case.result()
    assert case.held.before is not None
    assert plan.change == "step back"
    assert rows_of(entries) == rows_of(case.held.before())


@given(cases(budgets=False))
def test_the_former_epoch_is_found_under_another_name(case):
    if case.held.before is None or not case.held.before().present.all():
        return
    former = case.held.before()
    now = case.held.entries.sample_id[:]
    ids = former.sample_id[:]
    wanted = Placement("another", 2, len(ids), lambda: ids)
    plan = replace(case, wanted=wanted, rows_move=True).plan()
    assert plan.change == ("epoch" if np.array_equal(now, ids) else "step back")
    assert plan.entries is not None
    assert rows_of(plan.entries) == rows_of(former)


@given(cases(kinds=("same",)))
def test_nothing_is_done_where_all_rows_wanted_lie_already(case):
    def unknown():
        raise AssertionError("names decide: no ids are computed")

    whole = not case.held.num_missing
    wanted = replace(case.wanted, sample_ids=unknown) if whole else case.wanted
    plan = replace(case, wanted=wanted).plan()
    if whole:
        assert plan.change == "none"
        assert plan.entries is None
        assert plan.has_work == case.held.has_surplus
    else:
        assert plan.has_work


@given(cases(kinds=("same rows",)))
def test_another_name_or_epoch_of_the_same_rows_moves_none(case):
    plan = case.plan()
    if case.held.num_missing:
        return
    in_time = case.wanted.epoch == case.held.epoch or not case.rows_move
    assert plan.change == ("name" if in_time else "epoch")
    assert (plan.entries is None) == in_time
    assert not len(plan.missing.slots)


@given(cases())
def test_surplus_is_every_held_row_that_is_not_wanted_here_once(case):
    held, wanted = case.held.rows(), case.wanted.sample_ids()
    surplus = find_surplus(held, wanted)
    ids = surplus.sample_id.tolist()
    assert sorted(ids) == sorted(set(held.sample_id.tolist()) - set(wanted.tolist()))
    assert all(position == i for position, i in zip(surplus.position.tolist(), ids, strict=True))
