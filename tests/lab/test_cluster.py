"""Where no lab can be made, it says why."""

import os

import pytest

from tests.lab.cluster import what_is_missing


def test_a_missing_tool_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert what_is_missing().startswith("the lab needs ip, tc, unshare, nsenter")
    assert "install iproute2" in what_is_missing()


def test_another_user_than_root_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in what_is_missing()
