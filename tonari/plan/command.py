"""`tonari plan`: the time and memory of a job's step, before the job runs."""

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonari.names import EXAMPLES
from tonari.outputs import check_output, check_report
from tonari.plan.options import add_outputs, fraction, settings, whole
from tonari.plan.picture import part_name, plan_bars
from tonari.sizes import format_bytes
from tonari.terminal import show, wrote

if TYPE_CHECKING:
    from tonari.oracle.epoch import PlannedEpoch
    from tonari.plan.choice import Choice

NOT_PLANNED = (
    "what its allocator and libraries keep beside these tensors, and messages between GPUs that no "
    "probe timed, are known by a run alone"
)


def main(argv: list[str]) -> int:
    """Run the command.

    Args:
        argv: Its arguments, without the command's name.

    Returns:
        The exit status.

    Raises:
        ConfigError: If the settings are wrong, or the probe is of others.
    """
    given = _parser().parse_intermixed_args(argv)
    if given.probe is None:
        print(
            "tonari plan: needs a probe, which times a step of the job on this node: run "
            f"`tonari probe {given.config}`, then `tonari plan {given.config} --probe probe.json`. "
            f"Without this node, `tonari search {given.config} --cluster FILE --world RANKS` "
            "prices steps by equations",
            file=sys.stderr,
        )
        return 2
    check_output("--picture", given.picture)
    check_report("--report", given.report)
    check_output("--timeline", given.timeline)
    from tonari.oracle.cluster.cluster import Cluster, load_cluster
    from tonari.oracle.errors import OracleError
    from tonari.oracle.explain import explain
    from tonari.oracle.learned import learn
    from tonari.oracle.plan import timeline
    from tonari.oracle.probe.probe import Probe, load_probe
    from tonari.plan.choice import choice_words, plan_choices
    from tonari.plan.explain import NOTES, explanation_rows, explanation_table
    from tonari.plan.learned import learned_document, learned_words

    learned = learn(given.run) if given.run else None
    cluster: Cluster | Probe | None = None
    if given.cluster:
        is_probe = given.cluster.suffix == ".json"
        cluster = load_probe(given.cluster) if is_probe else load_cluster(given.cluster)
    choices = plan_choices(
        given.config, given.probe, given.overrides, cluster=cluster,
        hidden_fraction=given.hidden, tries=given.tries or [()],
    )  # fmt: skip
    are_many = given.probe.is_dir() or bool(given.tries)
    best = choices[0]
    epoch = best.plan.epoch
    if learned and not epoch:
        raise OracleError(
            f"{given.probe}: a probe without data, so there is no epoch to put beside {given.run}; "
            "probe without --no-data"
        )
    fed = []
    if given.feeders:
        from tonari.plan.feeders import feeder_words, plan_feeders

        fed = plan_feeders(
            best, most=given.feeders, cores=given.feeder_cores, cluster=cluster,
            hidden_fraction=given.hidden,
        )  # fmt: skip
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

        given.report.write_text(plan_page(choices, why, shlex.join(["tonari", "plan", *argv])))
    if given.json:
        documents = list(map(_document, choices))
        if why:
            documents[0]["explanation"] = [asdict(row) for row in why]
        if fed:
            documents[0]["feeders"] = [asdict(each) for each in fed]
        if epoch and learned:
            documents[0]["learned"] = learned_document(epoch, learned, given.run)
        print(json.dumps(documents if are_many else documents[0], indent=1))
        return 0
    if are_many:
        show([*choice_words(choices), "", "the first:", ""])
    lines = ["", *explanation_table(why).text(), "", *NOTES] if why else []
    epochs = best.config.run.epochs
    lines = [*_words(best), *lines, *_epoch_words(epoch, epochs)]
    lines += feeder_words(fed) if fed else []
    if epoch and learned:
        lines += learned_words(epoch, learned, given.run, epochs)
    show([*lines, *wrote(given.timeline, given.picture, given.report)])
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


def _words(choice: "Choice") -> list[str]:
    from tonari.plan.explain import tile_table

    planned, gpu = choice.plan, choice.probe.gpu
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
    return [
        *lines,
        "",
        f"most memory of tensors a rank, by coordinate of pp{' and tile' * bool(planned.tiles)}: "
        f"{memory}",
        *(["", *tile_table(planned.tiles).text()] if planned.tiles else []),
        *([f"{gpu}: {NOT_PLANNED}"] if gpu else []),
        *_gradient_words(choice),
    ]


def _gradient_words(choice: "Choice") -> list[str]:
    ways = choice.plan.gradients
    lines = ["", "gradients between nodes, averaged once, beside nothing else:", ""] if ways else []
    for way in ways:
        saved_s = ways[0].seconds - way.seconds
        pays = f"saves {saved_s:.3f} s" if saved_s > 0 else f"costs {-saved_s:.3f} s more"
        lines.append(
            f"  {way.kind:10} {format_bytes(way.sent_bytes):>9} a rank, {way.sending_s:.3f} s on "
            f"the links, {way.computing_s:.3f} s of a core{f': {pays}' if way != ways[0] else ''}"
        )
    return lines


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
        "--try", dest="tries", type=settings, action="append", metavar="'KEY=VALUE ...'",
        help="settings to choose among that need no probe of their own, such as "
        "'shuffle.exchange=0.1 data.cache.quota=1GB'; give it once for each",
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
        "--hidden", type=fraction, default=0.0, metavar="F",
        help="share of the rows that an epoch leaves out (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--feeders",
        type=whole,
        default=0,
        metavar="K",
        help="say whether 1 to K nodes that decode for those that train pay (tonari feed)",
    )
    parser.add_argument(
        "--feeder-cores",
        type=whole,
        metavar="N",
        help="cores of each (default: as many as the ranks of the probed node may use)",
    )
    parser.add_argument(
        "--explain", action="store_true",
        help="add a step by simple equations, term by term, beside the simulated one",
    )  # fmt: skip
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE",
        help="write three steps of all ranks for https://ui.perfetto.dev",
    )  # fmt: skip
    add_outputs(
        parser,
        picture="an epoch, or a step where the probe has no data",
        json="; `tonari train --plan` takes it",
    )
    return parser
