"""What the policies share: ranges of their settings, and how far a run has come."""


def check_fraction(where: str, value: float, *, below_one: bool = False) -> None:
    """Refuse a setting outside [0, 1], or outside [0, 1) where one would leave no rows.

    Raises:
        ValueError: If it is; ``where`` names the policy and the setting.
    """
    # Written so that NaN fails too.
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        expected = "0 <= value < 1" if below_one else "0 <= value <= 1"
        raise ValueError(f"{where} is {value}, expected {expected}; 0.3 stands for 30 %")


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
