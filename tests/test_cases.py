"""CI's cases hold each value, and other pairs in other tests."""

from itertools import product

from tests.cases import diagonal, diagonal_of, each_value_of, pairs_of

SIZES = {"shuffle": 3, "policy": 4, "kind": 2}


def test_each_value_of_each_parameter_comes_in_as_few_cases_as_can_be():
    for number in range(20):
        kept = diagonal_of(SIZES, f"test_{number}")
        assert len(kept) == 4
        for places, size in zip(zip(*kept, strict=True), SIZES.values(), strict=True):
            assert set(places) == set(range(size))


def test_in_a_few_tests_all_pairs_meet():
    pairs = {(case[0], case[1]) for n in range(12) for case in diagonal_of(SIZES, f"test_{n}")}
    assert len(pairs) == 12


def test_all_combinations_are_there_and_those_off_the_diagonal_are_nightly():
    @diagonal(a=[1, 2], b=["x", "y"])
    def test(a, b):
        del a, b

    (mark,) = vars(test)["pytestmark"]
    assert mark.name == "parametrize"
    names, cases = mark.args
    assert names == ["a", "b"]
    assert [case.values for case in cases] == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]
    nightly = [case.values for case in cases if case.marks]
    assert sorted(nightly) in ([(1, "x"), (2, "y")], [(1, "y"), (2, "x")])


def test_every_two_values_meet_in_few_cases_and_ci_takes_each_value_about_equally_often():
    axes = {"shuffle": list("abc"), "policy": list("defgh"), "kind": list("ij"), "more": list("kl")}

    def excluding(shuffle, policy, **others):
        return (shuffle, policy) == ("a", "d")

    cases = pairs_of(axes, "test", excluding)
    assert len(cases) < 20 < 60
    met = {(one, other) for case in cases for one in case for other in case}
    values = list(axes.values())
    for number, axis in enumerate(values):
        for others in values[:number]:
            assert set(product(others, axis)) - met <= {("a", "d")}
    assert ("a", "d") not in met
    kept = each_value_of(cases)
    assert len(kept) == 5
    assert set(kept) <= set(cases)
    for number, axis in enumerate(values):
        times = [sum(case[number] == value for case in kept) for value in axis]
        assert 1 <= min(times) <= max(times) <= min(times) + 1
