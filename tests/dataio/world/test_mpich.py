"""Which way MPICH goes, by who starts it."""

from importlib.metadata import PackageNotFoundError

import pytest

from dataio.world import limits

SRUN = {"SLURM_STEP_ID": "0", "PMI_FD": "11", "PMI_RANK": "0", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "from_pip", "chosen"),
    [
        (SRUN, True, "ofi"),
        (SRUN, False, None),  # the site's own, which may know UCX alone
        (SRUN | {"UCX_TLS": "tcp"}, True, None),
        (SRUN | {limits.NETMOD: "ucx"}, True, "ucx"),
        ({"PMI_FD": "11", "PMI_RANK": "0", "PMI_SIZE": "4"}, True, None),  # mpiexec
        ({"SLURM_STEP_ID": "0", "PMIX_RANK": "0"}, True, None),
    ],
)
def test_under_srun_the_mpich_from_pip_takes_libfabric_unless_somebody_chose(
    environ, from_pip, chosen, monkeypatch
):
    monkeypatch.setattr(limits, "_is_from_pip", lambda: from_pip)
    given = dict(environ)
    limits.choose_netmod(given)
    assert given.get(limits.NETMOD) == chosen
    assert {k: v for k, v in given.items() if k != limits.NETMOD} == {
        k: v for k, v in environ.items() if k != limits.NETMOD
    }


def test_the_mpich_of_another_place_is_not_taken_for_that_from_pip(monkeypatch):
    assert limits._is_from_pip()  # of this environment

    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(limits, "distribution", absent)
    assert not limits._is_from_pip()
