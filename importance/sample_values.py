"""A number for each sample, by sample id, as a policy is given them: checked, and named."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataio.base.seeding import digest
from dataio.plan.candidates import Total

Values = Sequence[float] | NDArray[np.generic] | Tensor
"""A number for each sample, by sample id."""


def checked_weights(given: object, *, where: str) -> NDArray[np.float64]:
    """Copy weights: float64[num_samples], read-only.

    Args:
        given: The weights.
        where: The policy and what they are, for the message.

    Raises:
        ValueError: If one is negative or not finite, or all are 0.
    """
    values = _copied(given).astype(np.float64, copy=False)
    bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))
    if values.ndim != 1 or len(bad) or not 0 < values.sum() < np.inf:
        found = f"of shape {values.shape}"
        if values.ndim == 1:
            found = (
                f"{values[bad[0]]} for sample {bad[0]}" if len(bad) else f"{values.sum()} in all"
            )
        raise ValueError(
            f"{where} are {found}, expected one finite number >= 0 for each sample, not all 0; "
            "0 leaves a sample out"
        )
    values.flags.writeable = False
    return values


def checked_classes(given: object, *, where: str) -> NDArray[np.int64]:
    """Copy the numbers of classes: int64[num_samples], read-only.

    Raises:
        ValueError: If they are not whole numbers, one a sample; ``where`` begins the message.
    """
    values = _copied(given)
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise ValueError(
            f"{where} is {values.dtype}{list(values.shape)}, expected a whole number for each "
            "sample, such as its label; number the classes, as "
            "np.unique(names, return_inverse=True)[1] does"
        )
    classes = values.astype(np.int64)
    classes.flags.writeable = False
    return classes


def check_length(values: NDArray[np.generic], num_samples: int, *, where: str) -> None:
    """Refuse values that are not one for each sample.

    Raises:
        ValueError: ``where`` begins the message.
    """
    if len(values) != num_samples:
        raise ValueError(
            f"{where}: {len(values)} numbers for a dataset of {num_samples} samples, expected one "
            "for each; give them in the order of sample ids"
        )


def _copied(given: object) -> NDArray[np.generic]:
    return np.array(given.detach().cpu().numpy() if isinstance(given, Tensor) else given)


def check_equal(values: NDArray[np.generic], total: Total, *, where: str) -> None:
    """Refuse values that are others in another pool. Collective where ``total`` is.

    Raises:
        ValueError: ``where`` begins the message.
    """
    mine = int(digest(values.tobytes())[:10], 16)
    everyone, num_pools = total(np.array([mine, 1])).tolist()
    if everyone != mine * num_pools:
        raise ValueError(
            f"{where} are not the same on every rank, expected one list of numbers; let the "
            "function go by the epoch alone, and seed what it draws"
        )


def name_of(given: object) -> str:
    """Name values so that equal ones have equal names on every rank, and others another."""
    if isinstance(given, np.ndarray):
        return f"<{len(given)} numbers {digest(given.tobytes())}>"
    if callable(given):
        return f"{given.__module__}.{getattr(given, '__qualname__', type(given).__qualname__)}"
    return repr(given)
