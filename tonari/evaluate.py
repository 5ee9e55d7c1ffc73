"""`tonari evaluate`: evaluate the weights of a run that has not evaluated them itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tonari.errors import CommandError


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate the weights of a run that have no result yet, in one process, on any node.

    With run.evaluation=elsewhere (or beside) these are the weights that the run hands over at each
    step whose evaluation is due, and leaves in its directory until they are evaluated. Of a run
    whose own ranks evaluate they are those of its checkpoints, where an evaluation of that step is
    not in the metrics. Model, test data and all else are as the run's config.json says. Relative
    paths in it count from the current directory: start it where the run was started.

    Each result is kept in RUN/evaluations. A run under way takes those of weights that it handed
    over into its metrics.jsonl and its page; into those of a run that has ended they are written
    here.

    To evaluate on another node while a run trains, start it with run.evaluation=elsewhere, and
    there `tonari evaluate RUN --follow`. It may be started at any time once the run
    has begun, and again if it was ended: nothing is left out.
    """

    run: Annotated[Path, tyro.conf.Positional]
    """The run.directory of tonari train."""
    follow: bool = False
    """Go on with weights that appear, until the run ends."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to compute. Last digits are those of the run on the same kind of device alone."""
    attached: bool = False
    """As tonari train starts it with run.evaluation=beside: ends when standard input is closed."""


def main(argv: list[str]) -> int:
    """Run the command, in one process.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        CommandError: If there is no such run.
        ConfigError: If it cannot be evaluated.
        DataioError: If its data, or the weights, cannot be used.
    """
    given = tyro.cli(
        Evaluate, args=argv, prog="tonari evaluate", config=(tyro.conf.FlagCreatePairsOff,)
    )
    # Only now: `--help` and wrong arguments should not wait for torch.
    from tonari.trainer.run.beside.evaluator import evaluate_run
    from tonari.trainer.watch.record import NAME

    if not (given.run / NAME).is_file():
        raise CommandError(
            f"{given.run}: found no run, expected the run.directory of tonari train, with its "
            f"{NAME}; give it once the run has begun"
        )
    best: dict[str, Any] = {}
    for result in evaluate_run(
        given.run, device=given.device, follow=given.follow, attached=given.attached
    ):
        print(_words(result), flush=True)
        if not best or result["evaluation_loss"] < best["evaluation_loss"]:
            best = result
    if best:
        print(f"lowest evaluation loss of these: step {best['step']}; results in {given.run}")
    else:
        print(f"{given.run}: nothing waits to be evaluated")
    return 0


def _words(result: dict[str, Any]) -> str:
    figures = {name: result[name] for name in result if name.endswith(("accuracy", "loss"))}
    said = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in figures.items())
    return (
        f"step {result['step']} (epoch {result['epoch']}): {said}, {result['evaluation_s']:.1f} s"
    )
