"""A stage of a pipeline, as torch's schedules pass microbatches through it."""

from typing import Any, cast

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from trainer.mesh.randomness import Randomness


class Stage(PipelineStage):
    """A stage that averages its gradients over the replicas only when ``syncs``."""

    syncs = True

    def __init__(self, *given: Any, randomness: Randomness, **named: Any) -> None:
        super().__init__(*given, **named)
        self._randomness = randomness

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """Pass a microbatch forward."""
        self._randomness.begin(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *given, **named)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do so where a schedule ends: of a step's batches, at the last only; never in `eval`."""
        if self.syncs:
            super().perform_reduce_grad(grad_scale_factor)

    # torch 2.13 asks for them in `eval` too, where a rank owns two stages in a row, and fails.
    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """Hand the input's gradient to the stage before, on the same rank."""
        if not self.has_backward:
            return ()
        gradients = super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]
        return cast(tuple[Tensor | None, ...], gradients)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Take the output's gradient from the stage after, on the same rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
