"""What a reader has to follow does not grow: `benchmarks/ratchet.toml` has the figures."""

import pytest

from benchmarks import ratchet


def test_no_figure_is_above_its_limit() -> None:
    allowed, found = ratchet.limits(), ratchet.figures()
    assert found.keys() == allowed.keys()
    over = {name: figure for name, figure in found.items() if figure > allowed[name]}
    assert not over, (
        f"limits: { {name: allowed[name] for name in over} }; see benchmarks/ratchet.py"
    )


def test_a_limit_rises_only_with_a_record_that_names_the_figure(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "ratchet.toml"
    monkeypatch.setattr(ratchet, "LIMITS", written)
    raised = '[limits]\nlines = 5\n[[raised]]\nfigure = "lines"\nby = 2\nadr = {}\n'
    written.write_text(raised.format(9999))
    with pytest.raises(ValueError, match="decision record 9999, expected a file in docs/adr"):
        ratchet.limits()
    written.write_text(raised.format(20))  # of packaging: it does not speak of lines' limit
    monkeypatch.setattr(ratchet, "ROOT", tmp_path)
    record = tmp_path / "docs" / "adr" / "0020-why.md"
    record.parent.mkdir(parents=True)
    record.write_text("nothing of it")
    with pytest.raises(ValueError, match="names the figure"):
        ratchet.limits()
    record.write_text("`lines` rise by 2")
    assert ratchet.limits() == {"lines": 7}
