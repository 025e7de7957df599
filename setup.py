"""Which modules make up the ``distconv`` package; everything else about the project is in ``pyproject.toml``."""

import atexit
import os
import shutil
import tempfile
from fnmatch import fnmatchcase

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ["jobs", "kernels", "layers", "perfmodel", "pipeline"]

# What reproduces papers and our own pages, and proves ourselves at length: commands for a checkout, not for users.
LEFT_OUT = [
    "distconv.jobs.papers.*",
    "distconv.jobs.bench.layers.pointcloud",
    "distconv.jobs.bench.planner",
    "distconv.jobs.bench.steps.gpu",
    "distconv.jobs.bench.steps.safeguards",
    "distconv.jobs.verification.accuracy",
    "distconv.jobs.verification.captures",
    "distconv.jobs.verification.differential.*",
    "distconv.jobs.verification.pipelines",
    "distconv.jobs.verification.predictions",
    "distconv.jobs.verification.soak",
]


class Build(build_py):
    """Takes the modules and the files of the packages but for those that are left out."""

    def find_package_modules(self, package, package_dir):
        """Name of the package, of the module and of its file for each."""
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if not _left_out(f"{package}.{each[1]}")]

    def find_data_files(self, package, src_dir):
        """Files of a package."""
        found = super().find_data_files(package, src_dir)
        return [
            each for each in found if not _left_out(f"{package}.{os.path.relpath(each, src_dir)}".replace("/", "."))
        ]


def _left_out(name):
    return any(fnmatchcase(name, pattern) for pattern in LEFT_OUT)


# The links distconv/layers -> ../layers, ... serve a bare checkout; here each folder is named by itself, so that the
# package is the same whether the links are there or not.
own = find_packages("distconv", exclude=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])
packages = ["distconv", *(f"distconv.{name}" for name in own)]
for folder in FOLDERS:
    packages += [f"distconv.{folder}", *(f"distconv.{folder}.{name}" for name in find_packages(folder))]

# A folder ``build`` in the checkout would outlive the installation, and go stale.
build = tempfile.mkdtemp(prefix="distconv-build-")
atexit.register(shutil.rmtree, build, ignore_errors=True)

setup(
    cmdclass={"build_py": Build},
    options={"build": {"build_base": build}},
    packages=packages,
    package_dir={f"distconv.{folder}": folder for folder in FOLDERS},
    package_data={
        "distconv": ["py.typed"],
        **{f"distconv.{folder}": ["**/*.cu", "**/*.json", "**/*.yaml", "**/*.sbatch"] for folder in FOLDERS},
    },
    include_package_data=False,
)
