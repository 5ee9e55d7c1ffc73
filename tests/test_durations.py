"""Files that take longest begin first; what was measured is kept."""

from tests.durations import longest_first, read, store


def test_files_are_sorted_by_all_of_their_tests_and_stay_whole():
    names = ["a::1", "b::1", "b::2", "c::1", "d::1", "b::3"]
    known = {"b::1": 4.0, "b::3": 4.0, "c::1": 5.0, "gone::1": 99.0}
    sorted_names = longest_first([(name, name) for name in names], known)
    assert sorted_names == ["b::1", "b::2", "b::3", "c::1", "a::1", "d::1"]
    assert longest_first([(name, name) for name in names[:2]], {}) == names[:2]


def test_what_was_measured_replaces_what_was_stored(tmp_path):
    path = tmp_path / "durations.json"
    assert read(path) == {}
    store({"a::1": 2.4, "a::2": 0.4, "b::1": 70.64}, path)
    assert read(path) == {"a::1": 2.4, "b::1": 70.6}
    store({"a::1": 0.1, "a::2": 9.0}, path)
    assert read(path) == {"a::2": 9.0, "b::1": 70.6}
