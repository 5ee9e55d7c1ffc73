"""A rank of a job that is killed, under mpiexec: see `tests/faults/kill`. Argument: JSON."""

import importlib
import json
import os
import sys

from tests.faults.kill.zygote import MODULES

if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    job = importlib.import_module(MODULES[request["what"]])
    job.run(request["argument"] | {"rank": int(os.environ["PMI_RANK"])})
