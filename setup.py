"""The one thing that pyproject.toml cannot say: find the folders' subpackages and prefix them with `corral`."""

from setuptools import find_namespace_packages, setup

FOLDERS = ["agents", "api", "launcher", "workers", "scheduling", "name_resolve", "experiments", "sbatch_templates"]
INCLUDE = [pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")]

setup(
    package_dir={"corral": "."},
    packages=[f"corral.{name}" for name in find_namespace_packages(include=INCLUDE, exclude=["*__pycache__*"])],
)
