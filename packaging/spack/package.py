# mypy: ignore-errors
"""Spack: copy this directory to packages/py-tonari of a repository of your own."""

from spack.package import PythonPackage, depends_on, license, variant, version


class PyTonari(PythonPackage):
    """Feeds distributed deep-learning training from node-local caches."""

    # Fill in the address of the release; `spack checksum py-tonari` writes its version line.
    homepage = "https://example.org/tonari"
    git = "https://example.org/tonari.git"

    license("Apache-2.0")

    version("main", branch="main")

    variant("mpi", default=True, description="Ranks over the MPI of this Spack")
    variant("cli", default=True, description="The command tonari")

    # Written by packaging/render.py from pyproject.toml:
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-torch@2.4:", type=("build", "run"))
    depends_on("py-numpy@1.26:2", type=("build", "run"))
    depends_on("py-typing-extensions@4.8:", type=("build", "run"))
    depends_on("py-tomli@2:", type=("build", "run"), when="^python@:3.10")
    depends_on("py-pyarrow@17:", type=("build", "run"))
    depends_on("py-webdataset@0.2.100:", type=("build", "run"))
    depends_on("py-braceexpand@0.1.7:", type=("build", "run"))
    depends_on("py-fsspec@2024.2:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))
    depends_on("py-simplejpeg@1.7.6:", type=("build", "run"))
    depends_on("py-pillow@10.3:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"), when="+mpi")
    depends_on("py-tyro@0.9:1", type=("build", "run"), when="+cli")
    depends_on("py-rich@13:", type=("build", "run"), when="+cli")
    depends_on("py-msgspec@0.19:0", type=("build", "run"), when="+cli")
    depends_on("py-scipy@1.12:1", type=("build", "run"), when="+cli")
    depends_on("c", type="build")
    depends_on("py-setuptools@77:", type="build")
    # End of what was written.
