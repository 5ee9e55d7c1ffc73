"""The versions of torch that the trainer works on: to import this is to check the one at hand.

``dataio``, ``shuffle`` and ``importance`` need little of torch, and take far older ones.
"""

import re

import torch

from dataio.base.errors import install_command

OLDEST = (2, 11)
ABOVE_NEWEST = (2, 16)
"""The first version that nobody has run the trainer's tests on."""
RANGE = f">={OLDEST[0]}.{OLDEST[1]},<{ABOVE_NEWEST[0]}.{ABOVE_NEWEST[1]}"


class TorchVersionError(ImportError):
    """The trainer does not work on this version of torch."""


def check_torch(version: str) -> None:
    """Refuse a torch on which pipelines, sharding or checkpoints may differ from those tested.

    Args:
        version: As ``torch.__version__`` has it: local builds such as ``2.13.0a0+gitfe42b`` count.

    Raises:
        TorchVersionError: If it is outside ``RANGE``.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) < ABOVE_NEWEST:
        raise TorchVersionError(
            f"trainer: found torch {version}, expected torch{RANGE}, whose pipeline and "
            f"checkpoint interfaces it is tested on; run `{install_command('trainer')}`, or use "
            "dataio, shuffle and importance alone, which work on this torch with a loop of your own"
        )


check_torch(torch.__version__)
