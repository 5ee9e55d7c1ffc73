"""Lists what a wheel holds: the packages as they lie here, and the examples below `tonari`."""

from setuptools import find_packages, setup

OURS = find_packages(include=["dataio*", "importance*", "shuffle*", "tonari*"])

setup(packages=[*OURS, "tonari.examples"], package_dir={"tonari.examples": "examples"})
