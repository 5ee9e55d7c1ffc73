"""What the policies share: ranges of their settings, and how far a run has come."""

from collections.abc import Callable


def check_fraction(where: str, value: float, *, below_one: bool = False) -> None:
    """Refuse a setting outside [0, 1], or outside [0, 1) where one would leave no rows.

    Raises:
        ValueError: If it is; ``where`` names the policy and the setting.
    """
    # Written so that NaN fails too.
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        expected = "0 <= value < 1" if below_one else "0 <= value <= 1"
        raise ValueError(f"{where} is {value}, expected {expected}; 0.3 stands for 30 %")


def check_refresh(policy: str, refresh_every: int | None) -> None:
    """Refuse a number of epochs below one.

    Raises:
        ValueError: If it is.
    """
    if refresh_every is not None and refresh_every < 1:
        raise ValueError(
            f"{policy}: refresh_every is {refresh_every}, expected >= 1; 1 means every epoch, "
            f"None never"
        )


def run_fraction(where: str, epoch: int, num_epochs: int | None, *, otherwise: str) -> float:
    """Say how much of the run lies before an epoch, in [0, 1).

    A quotient, because ``drop * num_epochs`` rounds: 0.55 of 100 epochs would begin at epoch 56.

    Args:
        where: The policy, for the message.
        epoch: The epoch asked for.
        num_epochs: Length of the run, None where the caller never said.
        otherwise: How to set the policy so that it needs no length.

    Raises:
        ValueError: If the length of the run is not known.
    """
    if num_epochs is None:
        raise ValueError(
            f"{where}: at epoch {epoch} the length of the run is not known, but its "
            f"schedule is in fractions of the run; iterate with `for epoch in loader.epochs(n)`, "
            f"or use {otherwise}"
        )
    return epoch / num_epochs


def annealing(
    where: str, epoch: int, num_epochs: int | None, *, delta: float, otherwise: str
) -> bool:
    """Say whether the part of the run has come in which every row is visible.

    Args:
        where: The policy, for the message.
        epoch: The epoch.
        num_epochs: Length of the whole run, None if the caller never said.
        delta: Fraction of the run before it; 1: it never comes.
        otherwise: What to write instead where the length is not known.
    """
    if delta == 1:
        return False
    return run_fraction(where, epoch, num_epochs, otherwise=otherwise) >= delta


def lr_drops(
    learning_rate: Callable[[int], float], num_epochs: int, *, factor: float = 0.5
) -> tuple[int, ...]:
    """Find the epochs at which a learning rate has dropped.

    ``Kakurenbo(drops=lr_drops(schedule, 90))`` hides less from then on, as the authors do at every
    step of theirs; of a cosine each halving is one.

    Args:
        learning_rate: epoch -> rate, without the policy's factor.
        num_epochs: Length of the run.
        factor: What it must have fallen to, of the peak or of where it last dropped.

    Returns:
        Epochs, ascending: those in which the rate is at most ``factor`` of what it was.
    """
    drops, level = [], 0.0
    for epoch in range(num_epochs):
        rate = learning_rate(epoch)
        if rate < level and rate <= factor * level:
            drops.append(epoch)
            level = rate
        elif not drops:
            level = max(level, rate)
    return tuple(drops)
