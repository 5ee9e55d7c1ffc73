"""Find the MPI launcher that belongs to this Python."""

import shutil
import sys
from pathlib import Path


def mpiexec_command(num_ranks: int) -> list[str]:
    """Begin a command line that starts ``num_ranks`` ranks on this machine.

    Raises:
        CommandError: If there is no launcher.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        # Not before: it imports the loader, and what starts ranks is light.
        from dataio.base.errors import install_command
        from tonari.errors import CommandError

        raise CommandError(
            "mpiexec: found neither beside this Python nor on PATH, expected it to start ranks; "
            f"{install_command('mpi-bundled')}, or load your site's MPI module"
        )
    return [found, "-n", str(num_ranks)]
