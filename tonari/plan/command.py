"""`tonari plan`: the time and memory of a job's step, before the job runs."""

import argparse
import gc
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonari.names import EXAMPLES
from tonari.outputs import check_output, check_report
from tonari.plan.picture import part_name, plan_bars, search_bars
from tonari.sizes import format_bytes

if TYPE_CHECKING:
    from tonari.oracle.plan import PlannedEpoch, StepPlan
    from tonari.plan.choice import Choice


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        ConfigError: If the settings are wrong, or the probe is of others.
    """
    parser = _parser()
    given = parser.parse_intermixed_args(argv)
    for share in given.hidden:
        if not 0 <= share < 1:
            parser.error(f"--hidden is {share}, expected a share in [0, 1)")
    check_output("--picture", given.picture)
    check_report("--report", given.report)
    command = shlex.join(["tonari", "plan", *argv])
    if given.search:
        if given.explain:
            parser.error("--explain is for --probe; leave it out of a search")
        if given.run:
            parser.error("--from is for --probe; leave it out of a search")
        if given.timeline:
            parser.error("--timeline is for --probe; leave it out of a search")
        if not given.cluster or not given.world:
            parser.error("--search needs --cluster FILE and --world N")
        if given.cluster.suffix == ".json":
            parser.error(
                "--search prices computation by the [device] of a machine's file, and --cluster is "
                f"a probe; give a file such as {EXAMPLES / 'clusters/h100.toml'}"
            )
        if not (given.data or given.probe) and (given.tries or given.hidden):
            parser.error("--try and --hidden choose for epochs; with --search give --data too")
        if given.data and given.probe:
            parser.error("--data and --probe both describe the data; give one of them")
        gc.disable()  # a tenth of the time or more, for 3 % of the memory: what is made stays
        try:
            return _search(given, command)
        finally:
            gc.enable()
    if not given.probe:
        parser.error("give --probe FILE, as tonari probe wrote it, or --search")
    if given.data:
        parser.error("--data is for --search; a probe knows its data")
    if len(given.hidden) > 1:
        parser.error("several --hidden are for --search; give one")
    check_output("--timeline", given.timeline)
    from tonari.oracle.cluster.cluster import Cluster, load_cluster
    from tonari.oracle.errors import OracleError
    from tonari.oracle.explain import explain
    from tonari.oracle.learned import learn
    from tonari.oracle.plan import timeline
    from tonari.oracle.probe.probe import Probe, load_probe
    from tonari.plan.choice import choice_words, plan_choices
    from tonari.plan.explain import explanation_rows, explanation_words
    from tonari.plan.learned import learned_document, learned_words

    learned = learn(given.run) if given.run else None
    cluster: Cluster | Probe | None = None
    if given.cluster:
        is_probe = given.cluster.suffix == ".json"
        cluster = load_probe(given.cluster) if is_probe else load_cluster(given.cluster)
    choices = plan_choices(
        given.config, given.probe, given.overrides, cluster=cluster,
        hidden_fraction=sum(given.hidden),
        tries=[tuple(words.split()) for words in given.tries] or [()],
    )  # fmt: skip
    are_many = given.probe.is_dir() or bool(given.tries)
    best = choices[0]
    epoch = best.plan.epoch
    if learned and not epoch:
        raise OracleError(
            f"{given.probe}: a probe without data, so there is no epoch to put beside {given.run}; "
            "probe without --no-data"
        )
    why = []
    if given.explain:
        explained = explain(best.config, best.probe, best.plan.simulation, cluster=cluster)
        why = explanation_rows(explained, best.plan.step_s)
    if given.timeline:
        given.timeline.write_text(json.dumps(timeline(best.plan.simulation)))
    if given.picture:
        given.picture.write_text(plan_bars(best.plan).svg())
    if given.report:
        from tonari.plan.report import plan_page

        given.report.write_text(plan_page(choices, why, command))
    if given.json:
        documents = list(map(_document, choices))
        if why:
            documents[0]["explanation"] = [asdict(row) for row in why]
        if epoch and learned:
            documents[0]["learned"] = learned_document(epoch, learned, given.run)
        print(json.dumps(documents if are_many else documents[0], indent=1))
        return 0
    if are_many:
        print("\n".join([*choice_words(choices), "", "the first:", ""]))
    lines = explanation_words(why) if why else []
    epochs = best.config.run.epochs
    lines = [*_words(best.plan), *lines, *_epoch_words(epoch, epochs)]
    if epoch and learned:
        lines += learned_words(epoch, learned, given.run, epochs)
    print("\n".join(lines))
    return 0


def _document(choice: "Choice") -> dict[str, Any]:
    from tonari.trainer.watch.plan import plan_settings

    planned = choice.plan
    document = {k: v for k, v in asdict(planned).items() if k != "simulation"}
    if planned.epoch:
        document["epoch"] |= {
            "epoch_s": planned.epoch.epoch_s, "pays_after": planned.epoch.pays_after
        }  # fmt: skip
    return {
        "overrides": choice.overrides,
        **document,
        "world_size": choice.probe.world_size,
        "settings": plan_settings(choice.config),
    }


def _search(given: argparse.Namespace, command: str) -> int:
    from tonari.oracle.cluster.cluster import load_cluster
    from tonari.oracle.search.search import search
    from tonari.plan.search import data_choices, search_words
    from tonari.trainer.config.config import load_config

    config, cluster = load_config(given.config, given.overrides), load_cluster(given.cluster)
    epochs = data_choices(
        given.config, given.overrides, cluster, world_size=given.world, words=given.data,
        probe=given.probe, tries=[tuple(words.split()) for words in given.tries] or [()],
        hidden_fractions=given.hidden or [0.0],
    ) if given.data or given.probe else []  # fmt: skip
    found = search(
        config, cluster, world_size=given.world, global_batch_size=given.global_batch or None,
        epochs=epochs,
    )  # fmt: skip
    if given.picture:
        given.picture.write_text(search_bars(found).svg())
    if given.report:
        from tonari.plan.report import search_page

        given.report.write_text(search_page(found, command))
    print(json.dumps(asdict(found), indent=1) if given.json else "\n".join(search_words(found)))
    return 0


def _words(planned: "StepPlan") -> list[str]:
    lines = [
        f"a step: {planned.step_s:.3f} s ({planned.low_s:.3f} to {planned.high_s:.3f}), "
        f"{planned.samples_per_s:,.1f} samples a second"
        + ("" if planned.epoch else ", without loading data"),
        "",
    ]
    # Means of all steps and ranks, where step_s is a median: shares are of their sum
    whole_s = sum(planned.parts_s.values())
    for name, seconds in sorted(planned.parts_s.items(), key=lambda part: -part[1]):
        lines.append(f"  {part_name(name):24} {seconds:8.3f} s  {seconds / whole_s:6.1%}")
    peaks = ", ".join(map(format_bytes, planned.peak_bytes))
    memory = peaks or f"not known: {planned.untraced}"
    return [*lines, "", f"most memory of tensors a rank, by coordinate of pp: {memory}"]


def _epoch_words(epoch: "PlannedEpoch | None", epochs: int) -> list[str]:
    if epoch is None:
        return []
    low_s, high_s = epoch.range_s
    hidden = f", {epoch.hidden_fraction:.0%} hidden" if epoch.hidden_fraction else ""
    lines = [
        "",
        f"an epoch: {epoch.epoch_s:.1f} s ({low_s:.1f} to {high_s:.1f}), {epoch.steps:,} steps"
        f"{hidden}",
        "",
        *(
            f"  {name:24} {seconds:8.2f} s  {seconds / epoch.epoch_s:6.1%}"
            for name, seconds in epoch.parts_s.items()
            if seconds
        ),
        "",
    ]
    if epoch.link_bytes:
        lines.append(
            f"over the busiest node's link, each way: {format_bytes(round(epoch.link_bytes))} an "
            "epoch of exchange"
        )
    if epoch.read_bytes:
        lines.append(
            f"of the steps, {epoch.windows_s:.2f} s wait for rows beyond the quota, for which a "
            f"node reads {format_bytes(round(epoch.read_bytes))} from the source in every epoch"
        )
    run_s = epoch.run_s(epochs)
    return [
        *lines,
        f"{epochs} epochs: {run_s / 3600:.2f} h, {run_s * epoch.num_nodes / 3600:.2f} node hours; "
        f"staging, before the first, {epoch.staging_s:.1f} s{_late_words(epoch)}"
        f"{_paying_words(epoch)}",
    ]


def _late_words(epoch: "PlannedEpoch") -> str:
    if not epoch.late_rows_s:
        return ""
    return f", and {epoch.late_rows_s:.1f} s for which the first waits for rows staged beside it"


def _paying_words(epoch: "PlannedEpoch") -> str:
    if not epoch.unstaged_s:
        return ""
    own_s = epoch.epoch_s - epoch.parts_s["steps"] + epoch.unstaged_s
    after = epoch.pays_after
    when = (
        "it never pays" if after is None else f"it has paid after {after} epoch{'s' * (after != 1)}"
    )
    return f"; without it an epoch would take {own_s:.1f} s, so that {when}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tonari plan",
        description="Say what a job takes before it runs, and where the time goes: its ranks, as "
        "`tonari probe` timed them, are simulated event by event, with the loader and the exchange "
        "beside them; on the node that was probed, or on many such nodes (--cluster).",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="as of tonari train")
    parser.add_argument(
        "overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="those of the probe"
    )
    parser.add_argument(
        "--probe", type=Path, metavar="FILE",
        help="what tonari probe wrote, whose KEY=VALUE hold here too; of a directory of probes all "
        "are compared, and the settings listed with the fastest first",
    )  # fmt: skip
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="'KEY=VALUE ...'",
        help="settings to choose among that need no probe of their own, such as "
        "'shuffle.exchange=0.1 data.cache.quota=1GB'; give it once for each, also with --search",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="run", type=Path, metavar="RUN",
        help="directory, or metrics, of a run that was trained with --plan, here or on other "
        "nodes: each part of the epoch is shown as planned alone, and times what that run "
        "measured over what was planned for it",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE",
        help="the nodes and what joins them, such as "
        f"{EXAMPLES / 'clusters/gigabit.toml'}, or a probe of several nodes, whose links the job's "
        "nodes have too (default: the node or nodes that were probed)",
    )  # fmt: skip
    parser.add_argument(
        "--search", action="store_true",
        help="without a probe: price every mesh, schedule and way of recomputation on --cluster, "
        "whose file describes what a rank computes on, and list the ten fastest that fit",
    )  # fmt: skip
    parser.add_argument(
        "--world", type=int, default=0, metavar="N", help="with --search: ranks of the job"
    )
    parser.add_argument(
        "--global-batch", type=int, default=0, metavar="ROWS",
        help="with --search: of a step, kept the same (default: those of CONFIG.toml on N ranks)",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="ROWSxBYTES",
        help="with --search: price whole epochs, of so many rows, such as 1281167x110KB; or "
        '"files" to count those of CONFIG.toml; or give --probe, which timed the data',
    )  # fmt: skip
    parser.add_argument(
        "--hidden", type=float, action="append", default=[], metavar="F",
        help="share of the rows that an epoch leaves out (default: 0); with --search give it once "
        "for each share to choose among",
    )  # fmt: skip
    parser.add_argument(
        "--explain", action="store_true",
        help="add a step by simple equations, term by term, beside the simulated one",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.svg",
        help="draw where the time goes as stacked bars: an epoch, a step where the probe has no "
        "data, or a step of each of the fastest with --search",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="FILE.html",
        help="write all of it as one page that needs nothing else (needs tonari[report])",
    )  # fmt: skip
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE",
        help="write three steps of all ranks for https://ui.perfetto.dev",
    )  # fmt: skip
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON document instead of tables; `tonari train --plan` takes it",
    )
    return parser
