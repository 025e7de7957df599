"""Spack: from a clone, ``spack develop --path . py-distconv@0.1.0``."""

from spack.package import PythonPackage, depends_on, version  # type: ignore[import-not-found]


class PyDistconv(PythonPackage):
    """Distributed tensors for PyTorch CNNs over MPI."""

    version("0.1.0")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools", type="build")
    depends_on("py-h5py", type=("build", "run"))
    depends_on("py-mpi4py@4:", type=("build", "run"))
    depends_on("py-msgspec@0.19:", type=("build", "run"))
    depends_on("py-numpy", type=("build", "run"))
    depends_on("py-pyyaml", type=("build", "run"))
    depends_on("py-scipy", type=("build", "run"))
    depends_on("py-torch@2.7:2.13", type=("build", "run"))
    depends_on("py-tqdm", type=("build", "run"))
