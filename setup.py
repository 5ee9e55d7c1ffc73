"""Lists what a wheel holds: the packages, the examples below `tonari`, and a small compiled part.

Where nothing compiles it, that part is left out, and the wheel is for any machine.
"""

import hashlib
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

OURS = find_packages(include=["dataio*", "importance*", "shuffle*", "tonari*"])
SOURCE = "dataio/rows/pictures.c"
# No part of Python's interface is used: one file is for all its versions.
PICTURES = Extension(
    "dataio.rows._pictures",
    [SOURCE],
    # `dataio.rows.at_once` loads no other than that of its own source.
    define_macros=[("TONARI_SOURCE", hashlib.sha256(Path(SOURCE).read_bytes()).hexdigest())],
    libraries=["m", "pthread"],
    # One multiplication after another, as Python does it.
    extra_compile_args=["-O3", "-ffp-contract=off"],
    py_limited_api=True,
    optional=True,
)


class Wheel(bdist_wheel):  # type: ignore[misc]
    """Names the wheel by what was compiled."""

    def get_tag(self) -> tuple[str, str, str]:
        """Give tags of Python, of its binary interface and of the machine."""
        machine = super().get_tag()[2]
        is_built = any(Path(self.bdist_dir).rglob("_pictures.*"))
        return "py3", "none", machine if is_built else "any"


setup(
    packages=[*OURS, "tonari.examples"],
    package_dir={"tonari.examples": "examples"},
    ext_modules=[PICTURES],
    cmdclass={"bdist_wheel": Wheel},
)
