"""Recipes agree with pyproject.toml and constraints.txt, and can be read by what reads them."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import pytest
import tomllib
import yaml  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.multirank import ROOT

RECIPES = ROOT / "packaging"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHM_BYTES_A_RANK = 5.5 * 2**20


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", RECIPES / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bounds_of(*extras: str) -> dict[str, SpecifierSet]:
    """Names as package indexes compare them, with the versions that pyproject.toml takes."""
    named = [*PROJECT["dependencies"]]
    for extra in extras:
        named += PROJECT["optional-dependencies"][extra]
    found = map(Requirement, named)
    return {_name(requirement.name): requirement.specifier for requirement in found}


def _name(name: str) -> str:
    return name.lower().replace("_", "-")


def test_recipes_are_as_pyproject_and_constraints_say(render: ModuleType) -> None:
    behind = [path.name for path, text in render.rendered().items() if path.read_text() != text]
    assert not behind, "run `python packaging/render.py`"


@pytest.mark.parametrize("path", ["spack/package.py", "easybuild/Tonari.eb", "render.py"])
def test_a_recipe_in_python_compiles(path: str) -> None:
    compile((RECIPES / path).read_text(), path, "exec")


def test_spack_takes_what_only_an_older_python_needs_with_that_alone() -> None:
    recipe = (RECIPES / "spack" / "package.py").read_text()
    assert [line.split('"')[1] for line in recipe.splitlines() if '"^python@:3.10"' in line] == [
        "py-tomli@2:"
    ]


def test_spack_takes_the_versions_that_pyproject_takes() -> None:
    tree = ast.parse((RECIPES / "spack" / "package.py").read_text())
    given = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "depends_on":
            name, _, versions = ast.literal_eval(call.args[0]).partition("@")
            given[name.removeprefix("py-")] = versions
    wanted = bounds_of("mpi", "cli") | {"python": SpecifierSet(PROJECT["requires-python"])}
    assert given.keys() == wanted.keys() | {"setuptools", "c"}
    for name, bounds in wanted.items():
        least, _, most = given[name].partition(":")
        assert least in bounds, name
        assert (f"{most}.9999" if most else "99999") in bounds, name
        # Within the first release of the series that Spack's upper end names, and not the next.
        if most:
            *head, last = map(int, most.split("."))
            assert ".".join(map(str, [*head, last + 1])) not in bounds, name


def test_easybuild_installs_what_the_sites_modules_do_not_bring() -> None:
    values: dict[str, Any] = {}
    exec((RECIPES / "easybuild" / "Tonari.eb").read_text(), values)  # it is data in Python
    assert (values["name"], values["version"]) == ("Tonari", PROJECT["version"])
    installed = {_name(str(name)): version for name, version, *_ in values["exts_list"][:-1]}
    brought = {"torch", "numpy", "pyarrow", "pillow", "scipy"}
    wanted = bounds_of("cli")
    assert installed.keys() <= wanted.keys() - brought
    assert {"webdataset", "simplejpeg", "xxhash", "tyro"} <= installed.keys()
    assert all(version in wanted[name] for name, version in installed.items())


def test_conda_renders_to_the_bounds_of_pyproject() -> None:
    def load(path: str, *, from_recipe_dir: bool) -> dict[str, Any]:
        assert from_recipe_dir
        return tomllib.loads((RECIPES / "conda" / path).read_text())

    template = jinja2.Template((RECIPES / "conda" / "meta.yaml").read_text())
    recipe = yaml.safe_load(template.render(load_file_data=load, compiler=str))
    assert recipe["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    assert recipe["build"]["entry_points"] == [f"tonari = {PROJECT['scripts']['tonari']}"]
    renamed = {"pytorch": "torch", "python-xxhash": "xxhash"}
    given: dict[str, str] = dict(line.split(" ", 1) for line in recipe["requirements"]["run"])
    taken = {_name(renamed.get(name, name)): SpecifierSet(v) for name, v in given.items()}
    assert taken.pop("python") == SpecifierSet(PROJECT["requires-python"])
    assert taken == bounds_of("cli")


def test_the_containers_steps_can_be_read_and_name_what_is_there() -> None:
    sections = _sections((RECIPES / "tonari.def").read_text())
    for name in ("post", "test", "runscript"):
        checked = subprocess.run(
            ["sh", "-n"], input=sections[name], capture_output=True, text=True, timeout=20
        )
        assert (checked.returncode, checked.stderr) == (0, ""), name
    sources = [line.split()[0] for line in sections["files"].splitlines() if line.strip()]
    # dist is made by the command at the top of the file.
    assert [source for source in sources if not (ROOT / source).exists()] in ([], ["dist"])
    (extras,) = re.findall(r"\[([\w,-]+)\]\"", sections["post"])
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert set(re.findall(r"\{\{ (\w+) \}\}", sections["header"])) == set(
        re.findall(r"^ *(\w+)=", sections["arguments"], re.MULTILINE)
    )
    commands = re.findall(r"\btonari (?!-)(\w+)", sections["header"])
    assert all(command in ("train",) for command in commands)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [((), 2, "expected pack, mount or unmount"), (("pack",), 1, "give the environment")],
)
def test_squashfs_says_what_is_missing(arguments: tuple[str, ...], status: int, words: str) -> None:
    ended = subprocess.run(
        ["bash", RECIPES / "squashfs.sh", *arguments], capture_output=True, text=True, timeout=20
    )
    assert ended.returncode == status
    assert words in ended.stderr


def test_the_mpi_job_is_one_that_the_operator_takes() -> None:
    job = _manifest("mpijob.yaml", "kubeflow.org/v2beta1", "MPIJob")
    replicas = job["mpiReplicaSpecs"]
    assert job["mpiImplementation"] == "MPICH"
    assert replicas.keys() == {"Launcher", "Worker"}
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    num_ranks = replicas["Worker"]["replicas"] * job["slotsPerWorker"]
    (script,) = launcher["args"]
    assert set(re.findall(r"-n (\d+)", script)) == {str(num_ranks)}
    checked = subprocess.run(["bash", "-n"], input=script, text=True, timeout=20)
    assert checked.returncode == 0
    _check_pod(replicas["Worker"]["template"]["spec"], job["slotsPerWorker"])
    assert launcher["env"] == replicas["Worker"]["template"]["spec"]["containers"][0]["env"]


def test_the_train_job_is_one_that_the_trainer_takes() -> None:
    job = _manifest("trainjob.yaml", "trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["runtimeRef"] == {"name": "torch-distributed"}
    assert job["trainer"]["command"] == ["torchrun"]
    assert job["trainer"]["args"][:3] == ["-m", "tonari", "train"]
    (patch,) = job["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    pod = replicated["template"]["spec"]["template"]["spec"]
    pod["containers"][0] |= {
        "env": job["trainer"]["env"], "resources": job["trainer"]["resourcesPerNode"]
    }  # fmt: skip
    _check_pod(pod, job["trainer"]["numProcPerNode"])


def _manifest(name: str, version: str, kind: str) -> dict[str, Any]:
    document = yaml.safe_load((RECIPES / "kubernetes" / name).read_text())
    assert (document["apiVersion"], document["kind"]) == (version, kind)
    spec: dict[str, Any] = document["spec"]
    return spec


def _check_pod(pod: dict[str, Any], num_ranks: int) -> None:
    """A pod has its machine's GPUs, its cache on the machine's disk, and room for MPICH."""
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == num_ranks
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert {"name": "TONARI_CACHE", "value": mounts["cache"]} in container["env"]
    assert "hostPath" in volumes["cache"]
    assert mounts["shm"] == "/dev/shm"
    assert int(volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30 > (
        num_ranks * SHM_BYTES_A_RANK
    )


def _sections(text: str) -> dict[str, str]:
    header, *rest = re.split(r"^%(\w+)\n", text, flags=re.MULTILINE)
    return {"header": header, **dict(zip(rest[::2], rest[1::2], strict=True))}


def test_render_says_which_recipe_is_behind() -> None:
    checked = subprocess.run(
        [sys.executable, RECIPES / "render.py", "--check"], capture_output=True, text=True,
        timeout=20, cwd=Path("/"),
    )  # fmt: skip
    assert (checked.returncode, checked.stdout) == (0, "")
