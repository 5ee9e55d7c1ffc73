"""An evaluation on every rank of a replica."""

import math
from collections.abc import Iterator

from dataio.evaluation import Evaluation
from dataio.rows.samples import Batch
from tonari.trainer.deliver.relay import STATE
from tonari.trainer.deliver.stream import Stream


class ReplicaEvaluation:
    """Batches of an evaluation on every rank of a replica; made by `ReplicaLoader.evaluation`."""

    def __init__(self, evaluation: Evaluation | None, stream: Stream) -> None:
        self._evaluation, self._stream = evaluation, stream
        if evaluation is not None:
            self._num_steps = len(evaluation)
            stream.send_header(STATE, self._num_steps)
        else:
            # Until its reader has staged it.
            header = stream.receive_header(STATE, limit_s=math.inf)
            assert header is not None, "nothing ends here"
            self._num_steps = header[0]

    def __len__(self) -> int:
        """Count the batches, the same on every rank."""
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches."""
        return (delivered.batch for delivered in self._stream.run(self._evaluation))

    def close(self) -> None:
        """Release cache and memory; idempotent."""
        self._stream.close()
        if self._evaluation is not None:
            self._evaluation.close()
