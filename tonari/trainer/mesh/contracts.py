"""What a task must give for each row, looked at as each batch passes: shapes alone."""

from torch import Tensor

from tonari.trainer.errors import ConfigError


def check_losses(losses: Tensor, rows: int) -> None:
    """Refuse losses that are not floating[rows]: with the rows' weights they would be spread out.

    Raises:
        ConfigError: Says what it gave.
    """
    if losses.shape != (rows,):
        raise ConfigError(
            f"the loss of {rows} rows is {list(losses.shape)}, expected [{rows}]: one loss a row, "
            'which importance and the weights of rows need; give reduction="none", and take the '
            "mean over what else a row has"
        )


def check_outcome(right: Tensor, confidence: Tensor, rows: int) -> None:
    """Refuse outcomes that are not [rows] each.

    Raises:
        ConfigError: Says what it gave.
    """
    for name, found in (("right", right), ("confidence", confidence)):
        if found.shape != (rows,):
            raise ConfigError(
                f"the outcome of {rows} rows has {name} of {list(found.shape)}, expected [{rows}]: "
                "one value a row; of a row with several answers give the share that is right"
            )
