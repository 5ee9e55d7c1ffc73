"""Which names on a page name nothing: classes, members, commands, options, keys, files.

    python docs/site/backticks.py [PAGE ...]     # each with its place; without a page: all pages

Looked at is what stands in backticks, in a form that says what it must be:

| form | must be |
|---|---|
| `Loader`, `Loader.save`, `Loader(exclude=)` | a class of ours, its member, its argument |
| `loader.save` | a member of the class that such a variable is of: `VARIABLES` |
| `dataio.Loader`, `shuffle.plan`, in blocks of Python too | a module of ours, or what one defines |
| `data.cache.quota`, `run.epochs=3`, `[mesh] tp` | a table and a key of a TOML file |
| `tonari bench io --size`, in blocks of shell too | a command, and options that it has |
| `--size` | an option of a command, or of a program in benchmarks/ or examples/ |
| `TONARI_CACHE` | a variable that the code knows |
| `dataio/store/`, `store/cache.py`, `order.py` | a file or directory, or a module's path's end |

Any other form is let through. A capitalised word that is no class of ours stands in `FOREIGN`, an
option of another program in `FOREIGN_OPTIONS`, what else looks like a name of ours in `OTHERS`. A
paragraph that names a commit may name what was there then; results and decision records are of
their time, and are not looked at.
"""

import argparse
import ast
import functools
import itertools
import re
import sys
import textwrap
from pathlib import Path

from defined import (  # type: ignore[import-not-found]
    ANY,
    COMMANDS,
    OPTION,
    PACKAGES,
    ROOT,
    has_key,
    options_of,
    our_code,
    toml_tables,
)

VARIABLES = {"loader": "Loader", "evaluation": "Evaluation", "job": "Job", "run": "RunRows"}
FOREIGN = frozenset(
    "None True False Path NDArray TimeoutError "  # Python, NumPy
    "DataLoader Dataset DistributedSampler WeightedRandomSampler DistributedDataParallel DTensor "
    "BlockMask ColwiseParallel RowwiseParallel SequenceParallel "  # torch
    "Accelerator AutoTokenizer ClassLabel LightningDataModule LlamaForCausalLM LSFEnvironment "
    "MDSWriter SequenceExample Stream StreamingDataset TokensLoader "  # formats
    "TrainingArguments "
    "SlurmdTimeout VmHWM".split()
)
FOREIGN_OPTIONS = frozenset(
    "--cpus-per-task --gpus-per-node --gpus-per-task --gres --mem --mpi --nodes --ntasks-per-node "
    "--het-group --open-mode --requeue --signal "  # Slurm
    "--kill-on-bad-exit --no-kill --wait "  # srun
    "--master-addr --max-restarts --nnodes --rdzv-endpoint --signals-to-handle "  # torchrun
    "--ipc --network --nv --rocm --shm-size --llio --devices --help --version".split()
)
OTHERS = frozenset(
    "my_step.py loop.py train.py preprocess_data.py "  # files that a reader makes, or Megatron has
    "tonari.run "  # an attribute of OpenTelemetry
    "[rows]".split()  # the shape of an array
)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
FENCE = re.compile(r"^([ >]*)(```+)(\w*)[^`\n]*\n(.*?)^\1\2`*[ ]*$", re.MULTILINE | re.DOTALL)
SHELL = ("", "bash", "sh", "console", "text")
COMMIT = re.compile(r"\b[Cc]ommit [0-9a-f]{7}\b")
NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\((.*)\))?(?:\[.*\])?", re.DOTALL)
CLASS = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
KEY = re.compile(r"([a-z]+(?:\.[A-Za-z_]\w*)+)(?:\s*=.*)?", re.DOTALL)
TABLE = re.compile(r"\[([a-z]+(?:\.\w+)*)\](?:\s+(\w+)\b.*)?", re.DOTALL)
VARIABLE = re.compile(r"(TONARI_[A-Z_]+)(?:=.*)?")
PATH = re.compile(rf"(?:{'|'.join((*PACKAGES, 'docs', 'packaging'))})/[\w./*-]*")
# A name that ends so is a file's, which is looked for only if it is a module.
FILE = re.compile(
    r"[\w.-]+\.(?:bin|csv|def|h5|html|idx|json|jsonl|lock|md|npy|npz|parquet|pbs|png|safetensors|"
    r"sbatch|sh|so|toml|yaml|yml)"
)
MODULE_FILE = re.compile(r"[\w/]+\.py")


def absent(markdown: str) -> list[tuple[int, str]]:
    """List the names of a page that name nothing, each after its line, counted from 1."""
    found = []
    for fence in FENCE.finditer(markdown):
        if fence[3] in SHELL:
            first = markdown.count("\n", 0, fence.start(4)) + 1
            block = fence[4].replace("\\\n", " \x00")  # a command goes on; its lines are counted
            for line in block.splitlines():
                command = re.sub(r"(^|\s)#.*", "", line.replace("\x00", ""))
                found += [(first, name) for name in _absent_of_shell(command)]
                first += 1 + line.count("\x00")
        elif fence[3] == "python":
            found += _absent_of_python(fence[4], markdown.count("\n", 0, fence.start(4)) + 1)
    text = FENCE.sub(lambda fence: re.sub(r"[^\n]", " ", fence[0]), markdown)
    for paragraph in re.finditer(r"(?:.+\n?)+", text):
        if not COMMIT.search(paragraph[0]):
            for span in SPAN.finditer(paragraph[0]):
                line = text.count("\n", 0, paragraph.start() + span.start()) + 1
                found += [(line, name) for name in _absent(" ".join(span[2].split()))]
    return sorted(found)


def _absent_of_python(block: str, first: int) -> list[tuple[int, str]]:
    """Look at what is used of our packages, and with which keywords."""
    try:
        nodes = [*ast.walk(ast.parse(textwrap.dedent(block)))]
    except SyntaxError:  # what shows where something stands, with dots for the rest
        return []
    spans = {
        (first + node.lineno - 1, ast.unparse(node)): ""
        for node in nodes
        if isinstance(node, ast.Attribute)
    }
    for node in nodes:
        if isinstance(node, ast.Call):
            words = ", ".join(f"{each.arg}=" for each in node.keywords if each.arg)
            spans[first + node.lineno - 1, ast.unparse(node.func)] = f"({words})"
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                spans[first + node.lineno - 1, f"{node.module}.{each.name}"] = ""
    return [
        (line, name)
        for (line, span), words in spans.items()
        if span.partition(".")[0] in ("dataio", "importance", "shuffle", "tonari")
        for name in _absent(f"{span}{words}")
    ]


def _absent_of_shell(line: str) -> list[str]:
    commands = re.findall(r"(?:^|\s)tonari (?=[a-z-])([^|;&>]*)", line)
    return [name for words in commands for name in _absent_command(words)]


def _absent_command(words: str) -> list[str]:
    """Look at what stands behind ``tonari``."""
    given = words.split()
    # The longest that is one: `bench io` before `bench`.
    for length in (2, 1):
        command = " ".join(given[:length])
        if command in COMMANDS:
            options = OPTION.findall(" ".join(given[length:]).partition(" -- ")[0])
            return [
                f"tonari {command} {each}" for each in options if each not in options_of(command)
            ]
    if not given or not re.fullmatch("[a-z]+", given[0]):
        return []  # `tonari COMMAND`, `tonari --help`
    is_group = any(command.startswith(f"{given[0]} ") for command in COMMANDS)
    if is_group and not re.fullmatch("[a-z]+", " ".join(given[1:2])):
        return []  # `tonari cache`, `tonari bench --help`
    return [f"tonari {' '.join(given[: 1 + is_group])}"]


def _absent(span: str) -> list[str]:
    """Return what a span names that is not there: nothing, itself, or options of a command."""
    if span == "tonari" or span.startswith("tonari "):
        return _absent_command(span.removeprefix("tonari"))
    if span.startswith("--"):
        return [
            each for each in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", span) if not _is_option(each)
        ]
    return [] if _is_there(span) else [span]


def _is_option(option: str) -> bool:
    return (
        option in FOREIGN_OPTIONS
        or option in our_code().options
        or any(option in options_of(command) for command in COMMANDS)
    )


def _is_there(span: str) -> bool:
    if variable := VARIABLE.fullmatch(span):
        return variable[1] in our_code().variables
    if PATH.fullmatch(span):
        return any(True for _ in ROOT.glob(span.rstrip("/")))
    if span in OTHERS or FILE.fullmatch(span):
        return True
    if MODULE_FILE.fullmatch(span):
        return any(path.endswith(f"/{span}") for path in _files())
    if head := TABLE.fullmatch(span):
        return has_key(head[1]) and (not head[2] or has_key(f"{head[1]}.{head[2]}"))
    named = NAME.fullmatch(span)
    key = KEY.fullmatch(span)
    table = key[1].partition(".")[0] if key else ""
    if key and table in toml_tables():
        # `shuffle` and `importance` are packages too, and `run` is a variable.
        is_other = table in (*PACKAGES, *VARIABLES)
        return has_key(key[1]) or (is_other and named is not None and _is_ours(named))
    return _is_ours(named) if named else True


def _is_ours(named: re.Match[str]) -> bool:
    """Say whether a dotted name is what it must be; true where it need not be anything."""
    code = our_code()
    names, given = named[1].split("."), named[2] or ""
    if names[0] in PACKAGES and len(names) > 1:
        for length in range(len(names) - 1, 0, -1):
            module = ".".join(names[:length])
            if ".".join(names) in code.modules:
                return True
            if module in code.modules:
                if names[length] not in code.modules[module]:
                    return False
                names = names[length:]
                break
    elif names[0] in VARIABLES and len(names) > 1:
        names[0] = VARIABLES[names[0]]
    elif not CLASS.fullmatch(names[0]) or names[0] in FOREIGN:
        return True
    elif names[0] not in code.members:
        return any(names[0] in defined for defined in code.modules.values())
    for owner, member in itertools.pairwise(names):
        if owner in code.members and not code.has_member(owner, member):
            return False
    taken = code.takes(names[-1])
    return not taken or ANY in taken or set(_keywords(given)) <= taken


def _keywords(given: str) -> list[str]:
    """List the keywords of a call, but for those of calls within it."""
    while re.search(r"\([^()]*\)|\{[^{}]*\}", given):
        given = re.sub(r"\([^()]*\)|\{[^{}]*\}", "", given)
    return re.findall(r"(?:^|[,\s])(\w+)=(?!=)", given)


@functools.cache
def _files() -> list[str]:
    places = (*PACKAGES, "docs/site", "packaging")
    paths = (path for place in places for path in (ROOT / place).rglob("*.py"))
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in paths]


def pages() -> list[Path]:
    """List the pages that are looked at."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in every if path.parent.name not in ("adr", "results")]


def main() -> int:
    """Print what is named and is not there."""
    parser = argparse.ArgumentParser(description="Find names that name nothing.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as docs/plan.md")
    given = [Path(page) for page in parser.parse_args().pages]
    found = [
        f"{page}:{line}: {name}"
        for page in given or pages()
        for line, name in absent(page.read_text())
    ]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
