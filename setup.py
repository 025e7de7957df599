"""Which folders make up the ``distconv`` package; everything else about the project is in ``pyproject.toml``."""

import atexit
import shutil
import tempfile

from setuptools import find_packages, setup

FOLDERS = ["jobs", "kernels", "layers", "perfmodel", "pipeline"]

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
    options={"build": {"build_base": build}},
    packages=packages,
    package_dir={f"distconv.{folder}": folder for folder in FOLDERS},
    package_data={
        "distconv": ["py.typed"],
        **{f"distconv.{folder}": ["**/*.cu", "**/*.json", "**/*.yaml", "**/*.sbatch"] for folder in FOLDERS},
    },
    include_package_data=False,
)
