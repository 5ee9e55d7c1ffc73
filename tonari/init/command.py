"""`tonari init`: a config, a loop and a batch script for the machine it stands on."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dataio import DataioError
from dataio.source.names import IMAGE_KEYS, LABEL_KEYS
from dataio.source.text.dataset import INFO
from tonari.errors import CommandError
from tonari.init.data import Found, find_test, look_into
from tonari.names import EXAMPLES

Scheduler = Literal["slurm", "pbs", "none"]
COMMENT = re.compile(r"^(\S.*?) +(# .*)$", re.MULTILINE)
"""Behind a line of TOML; all of them begin in one column."""
QUEUED = "; in the queue by the script beside this file"
HERE, SLURM = Path(__file__).parent, EXAMPLES / "slurm"
SUBMIT = {
    "slurm": ("sbatch job.sbatch", "sbatch loop.sbatch"),
    "pbs": (
        "qsub job.pbs",
        'qsub -v PROGRAM="loop.py --saved runs/loop/checkpoints",RUN_DIR=runs/loop job.pbs',
    ),
    "none": ("mpiexec -n 2 tonari train train.toml", "mpiexec -n 2 python loop.py"),
}
"""By scheduler: what starts train.toml, and what loop.py."""


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write train.toml, loop.py and, where jobs are queued, a batch script: files to change.

    train.toml is for `tonari train`; loop.py is a loop of your own, which saves and goes on. The
    batch scripts of both are for the scheduler that is found here: sbatch of Slurm, or qsub and
    pbsnodes of PBS. Nothing that is there already is written over.
    """

    directory: Annotated[Path, tyro.conf.Positional] = Path()
    """Where they go; made if need be."""
    data: str = "shards/train-*.tar"
    """What to train on, as a loader takes it. It is looked into: for the fields, the number of
    classes, the size of the pictures, and test files: those with val, validation or test in their
    name where these have train."""
    text: bool = False
    """Write train.toml for text, and no loop.py: --data is a corpus, which the next step packs into
    data/train, or what tonari pack wrote."""
    image: str = ""
    """Extension or column of the image; found in the data unless given."""
    label: str = ""
    """Extension or column of the class; found in the data unless given."""
    nodes: int = 4
    """Nodes of the batch script."""
    ranks_per_node: int = 1
    """Ranks on each: one a GPU."""
    time: str = "01:00:00"
    """Time limit of the batch script."""
    scheduler: Literal["auto", "slurm", "pbs", "none"] = "auto"
    """For which scheduler; none writes no batch script."""


def main(argv: list[str]) -> int:
    """Run the command.

    Raises:
        CommandError: If a number is below 1, or a file is there already.
    """
    options = tyro.cli(Init, args=argv, prog="tonari init", config=(tyro.conf.FlagCreatePairsOff,))
    if min(options.nodes, options.ranks_per_node) < 1:
        raise CommandError(
            f"--nodes is {options.nodes} and --ranks-per-node {options.ranks_per_node}, expected "
            "both >= 1; give for example --nodes 2"
        )
    scheduler = find_scheduler() if options.scheduler == "auto" else options.scheduler
    look, found = _look(options)
    texts = write_texts(options, scheduler, look=look, python=sys.executable)
    corpus = "CORPUS" if options.data == Init.data else shlex.quote(_absolute(options.data))
    if there := [name for name in texts if (options.directory / name).exists()]:
        raise CommandError(
            f"{options.directory}: found {', '.join(there)}, expected none of them; remove or "
            "rename these, or give another directory"
        )
    options.directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (options.directory / name).write_text(text)
    submit, submit_loop = SUBMIT[scheduler]
    if found:
        print(found)
    print(f"wrote {', '.join(texts)} into {options.directory}; look through them, then:")
    print(f"  cd {options.directory}")
    if options.text and not _is_packed(options.data):
        print(f"  tonari pack {corpus} data/train --tokenizer bytes    # or a tokenizer.json")
    print("  tonari train train.toml --dry-run    # the settings, and what they come to")
    print(f"  {submit}")
    if "loop.py" in texts:
        print(f"  {submit_loop}    # instead: a loop of your own")
    return 0


def _look(options: Init) -> tuple[Found, str]:
    """Look into the data, and say what was found: nothing of text."""
    look = Found(options.image or IMAGE_KEYS[0], options.label or LABEL_KEYS[0], 10, 32, False)
    if options.text:
        return look, ""
    words = "--data names no data to look into: change image, label, num_classes and size yourself"
    if options.data != Init.data:
        try:
            look = look_into(options.data, image=options.image, label=options.label)
        except DataioError as error:
            return (
                look,
                f"could not look into the data ({error}); change image, label, "
                "num_classes and size yourself",
            )
        words = (
            f"found {look.num_classes} classes in {look.label!r}, and pictures in {look.image!r} "
            f"that suit a size of {look.size}"
        )
    return look, words


def find_scheduler() -> Scheduler:
    """Find out who queues jobs here, by the commands that are installed."""
    if shutil.which("sbatch"):
        return "slurm"
    # Grid Engine has a qsub too.
    return "pbs" if shutil.which("qsub") and shutil.which("pbsnodes") else "none"


def write_texts(options: Init, scheduler: Scheduler, *, look: Found, python: str) -> dict[str, str]:
    """Write the files' texts, by name.

    Args:
        options: What was asked for.
        scheduler: Who queues jobs.
        look: What the data holds.
        python: The interpreter that the batch script calls.
    """
    size, submit_loop = f"{options.nodes}:mpiprocs={options.ranks_per_node}", SUBMIT[scheduler][1]
    mpiexec = Path(python).with_name("mpiexec")
    given = options.data
    if given != Init.data and "://" not in given:  # found from where the files go, too
        given = _absolute(given)
    data, image, label = map(json.dumps, (given, look.image, look.label))
    test = find_test(given)
    queued = {QUEUED: "" if scheduler == "none" else QUEUED}
    fields = queued | {
        '"shards/train-*.tar"': data,
        '# test = "shards/val-*.tar"': f"test = {json.dumps(test)}" if test else '# test = "..."',
        'image = "jpg"': f"image = {image}",
        'default="jpg"': f"default={image}",
        "(jpg) and its class (cls)": f"({look.image}) and its class ({look.label})",
        'label = "cls"': f"label = {label}",
        'default="cls"': f"default={label}",
        '"--size", 32': f'"--size", {look.size}',
        '"--classes", 10': f'"--classes", {look.num_classes}',
        '"data", help': f'"data", nargs="?", default={data}, help',
        'examples/slurm/loop.py "shards/train-{000000..000003}.tar"': "loop.py",
        'sbatch examples/slurm/loop.sbatch "/shared/train-{000000..000003}.tar"': submit_loop,
        "size = 32": f"size = {look.size}",
        "num_classes = 10": f"num_classes = {look.num_classes}",
    }
    if look.is_exact:
        crop = 'crop = "random"  # a part of each image, moved by up to so many pixels\npadding = 4'
        fields['crop = "resized"                          # a random part of each image'] = crop
    else:
        fields["flip = 0.5"] = f"flip = 0.5\nresize_short = {look.size * 8 // 7}  # of a test image"
    if look.size > 64:
        fields['kind = "small_cnn"'] = 'kind = "resnet50"'
    job = {
        "--nodes=4": f"--nodes={options.nodes}",
        "--ntasks-per-node=1\n#SBATCH --time": f"--ntasks-per-node={options.ranks_per_node}\n"
        "#SBATCH --time",
        "=01:00:00": f"={options.time}",
        "select=4:mpiprocs=1": f"select={size}",
        "${PYTHON:-python}": f"${{PYTHON:-{python}}}",
        # PBS has a mpiexec of its own, and so may the system: neither is that of pip's mpich.
        "${MPIEXEC:-mpiexec}": f"${{MPIEXEC:-{mpiexec if mpiexec.exists() else 'mpiexec'}}}",
        "${CONFIG:-examples/cifar10.toml}": "${CONFIG:-train.toml}",
        "examples/slurm/train.sbatch": "job.sbatch",
        'examples/slurm/loop.sbatch "/shared/train-{000000..000127}.tar"': "loop.sbatch",
        "examples/slurm/loop.py": "loop.py",
        " data.train=/shared/cifar10-train.parquet": "",
    }
    if options.text:
        packed = {'"data/train"': data} if _is_packed(given) else {}
        texts = {"train.toml": _filled(HERE / "text.toml", queued | packed)}
    else:
        toml = _filled(HERE / "train.toml", fields)
        toml = COMMENT.sub(lambda at: f"{at[1] + '  ':<42}{at[2]}", toml)
        texts = {"train.toml": toml, "loop.py": _filled(SLURM / "loop.py", fields)}
    if scheduler == "pbs":
        texts["job.pbs"] = _filled(HERE / "train.pbs", job)
    if scheduler == "slurm":
        texts["job.sbatch"] = _filled(SLURM / "train.sbatch", job)
        if "loop.py" in texts:
            texts["loop.sbatch"] = _filled(SLURM / "loop.sbatch", job)
    return texts


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


def _is_packed(directory: str) -> bool:
    return (Path(directory) / INFO).is_file()


def _filled(template: Path, words: Mapping[str, str]) -> str:
    pattern = re.compile("|".join(map(re.escape, words)))
    return pattern.sub(lambda match: words[match[0]], template.read_text())
