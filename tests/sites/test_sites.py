"""Each site's page holds its script as it is, and the script asks for what there is."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.multirank import ROOT
from tonari.trainer.config.config import load_config

PAGES, SCRIPTS = ROOT / "docs" / "sites", ROOT / "examples" / "sites"
SITES = {
    "abci3": "abci3.pbs",
    "frontier": "frontier.sbatch",
    "fugaku": "fugaku.pjm",
    "lumi": "lumi.sbatch",
    "perlmutter": "perlmutter.sbatch",
    "slurm_cloud": "slurm_cloud.sbatch",
    "tsubame4": "tsubame4.sge",
}
TIME = r"(?P<hours>\d\d):(?P<minutes>\d\d):(?P<seconds>\d\d)"
DIRECTIVES = {
    ".pbs": (r"#PBS ", rf"-(N|q|j|k) \S+|-l select=\d+(:\w+=\d+)*|-l walltime={TIME}"),
    ".sge": (r"#\$ ", rf"-(N|j) \S+|-cwd|-l \w+=\d+|-l h_rt={TIME}"),
    ".pjm": (r"#PJM ", rf'-N \S+|-j|-L "(\w+=\w+|elapse={TIME})"|--(mpi|llio) \S+'),
    ".sbatch": (r"#SBATCH ", rf"--(requeue|exclusive|[a-z-]+=[\w.,:@%-]+|time={TIME})"),
}
SLURM_OPTIONS = frozenset(
    "job-name partition nodes ntasks-per-node cpus-per-task gpus-per-task gpus-per-node gpu-bind "
    "constraint network time signal requeue open-mode output qos mem exclusive".split()
)

scripts = pytest.mark.parametrize("script", sorted(SITES.values()))


@pytest.mark.parametrize(("site", "script"), SITES.items())
def test_a_page_holds_its_script_and_says_what_was_not_run(site: str, script: str) -> None:
    page = (PAGES / f"{site}.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```\n", page, re.DOTALL)
    assert block == (SCRIPTS / script).read_text(), f"copy examples/sites/{script} into {site}.md"
    assert page.splitlines()[2].startswith("Not run by us.")
    assert "# Not run by us" in block
    assert f"({site}.md)" in (PAGES / "index.md").read_text()


@pytest.mark.parametrize("site", SITES)
def test_a_pages_facts_name_their_sources(site: str) -> None:
    text, _, listed = (PAGES / f"{site}.md").read_text().partition("## Sources\n")
    numbers = {int(number) for number in re.findall(r"^(\d+)\. .*\S", listed, re.MULTILINE)}
    cited = {
        int(number)
        for group in re.findall(r"\[(\d+(?:, \d+)*)\]", text)
        for number in group.split(", ")
    }
    assert cited == numbers != set()
    assert re.search(r"looked up on \d{4}-\d\d-\d\d", text)
    table = [line for line in text.splitlines() if line.startswith("| ") and len(line) > 5]
    assert all("[" in line or "not verified" in line or site == "slurm_cloud" for line in table[1:])


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.md")), ids=lambda path: path.name)
def test_a_page_is_short_and_its_links_lead_somewhere(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 90
    assert not [line for line in lines if len(line) > 100 and "http" not in line]
    for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / link).exists() or link == "../packaging.md", link


def test_every_script_has_a_page() -> None:
    assert {path.name for path in SCRIPTS.iterdir()} == set(SITES.values())
    assert {path.stem for path in PAGES.glob("*.md")} == {*SITES, "index"}


@scripts
def test_bash_can_read_the_script(script: str) -> None:
    checked = subprocess.run(
        ["bash", "-n", SCRIPTS / script], capture_output=True, text=True, timeout=20
    )
    assert (checked.returncode, checked.stderr) == (0, "")


@scripts
def test_the_schedulers_lines_are_well_formed_and_come_first(script: str) -> None:
    prefix, form = DIRECTIVES[Path(script).suffix]
    text = (SCRIPTS / script).read_text()
    head = list(_head(text))
    given = [re.sub(prefix, "", line) for line in head if re.match(prefix, line)]
    assert len(given) >= 5
    wrong = [line for line in given if not re.fullmatch(form, line)]
    assert not wrong
    # A scheduler reads no line after the first command.
    assert len(given) == len(re.findall(rf"^{prefix}", text, re.MULTILINE))
    if script.endswith(".sbatch"):
        names = {line.removeprefix("--").split("=")[0] for line in given}
        assert names <= SLURM_OPTIONS
        assert {"signal", "requeue", "open-mode", "time"} <= names
    (limit,) = filter(None, (re.search(TIME, line) for line in given))
    if "LIMIT_S" in text:
        seconds = int(limit["hours"]) * 3600 + int(limit["minutes"]) * 60 + int(limit["seconds"])
        assert f"LIMIT_S={{LIMIT_S:-{seconds}}}".replace("={", "=${") in text


@scripts
def test_the_script_stages_before_it_trains_into_the_nodes_own_directory(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    assert "TONARI_CACHE" in text
    if script.endswith(".sbatch"):
        # exec: Slurm signals the script's process, which must be the one that hands it on.
        assert 'exec bash examples/slurm/stage_then_train.sbatch "$@"' in text
        assert (ROOT / "examples" / "slurm" / "stage_then_train.sbatch").exists()
    else:
        commands = [command for command, _ in _tonari_calls(text)]
        assert commands == ["cache stage", "train"]


@scripts
def test_every_option_and_key_in_the_script_exists(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    if script.endswith(".sbatch"):
        text = (ROOT / "examples" / "slurm" / "stage_then_train.sbatch").read_text() + text
    from tonari.cache.stage import Stage
    from tonari.train.command import _parser

    staged = {f"--{name.replace('_', '-')}" for name in Stage.__dataclass_fields__}
    trained = {option for action in _parser()._actions for option in action.option_strings}
    known = {"cache stage": staged, "train": trained, "cache prune": {"--older-than"}}
    for command, arguments in _tonari_calls(text):
        options = {word for word in arguments if word.startswith("--")}
        assert options <= known[command], command
    overrides = set(re.findall(r"(?<![\w.])((?:data|run)\.\w+)=", text))
    assert overrides
    values = {"run.epochs": "90", "run.checkpoint_steps": "500"}
    load_config(
        ROOT / "examples" / "cifar10.toml", [f"{key}={values.get(key, 'x')}" for key in overrides]
    )


@scripts
def test_a_missing_setting_is_one_line_that_says_what_to_give(script: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    ended = subprocess.run(
        [bash, SCRIPTS / script], capture_output=True, text=True, timeout=20, cwd=tmp_path,
        env={"PATH": "/nowhere"},
    )  # fmt: skip
    assert ended.returncode != 0
    assert re.fullmatch(r".*: (give|run) .*\n", ended.stderr)
    assert ended.stdout == ""


def _head(text: str) -> "list[str]":
    lines = text.splitlines()
    end = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    return lines[:end]


def _tonari_calls(text: str) -> list[tuple[str, list[str]]]:
    """The commands of Tonari in a script, each with its words."""
    joined = re.sub(r"\\\n", " ", text)
    calls = []
    for rest in re.findall(r"-m tonari (.*)", joined):
        words = shlex.split(rest.rstrip("& "))
        size = 2 if words[0] in ("cache", "bench") else 1
        calls.append((" ".join(words[:size]), words[size:]))
    return calls
