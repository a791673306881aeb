"""Make a folder that tests and measures Heedful on a GPU machine that has PyTorch but no package index.

python scripts/gpu_bundle.py FOLDER --python 3.12 --has numpy scipy pyarrow     # on this machine
python FOLDER/run_gpu.py --part tests                                           # on the GPU machine

The folder has the committed code, an archive of the packages that Heedful, its tests and its benchmarks import, for
that version of Python, and run_gpu.py, which unpacks them and runs one part. `kernels`, `compiled` and `tests` run
parts of tests/gpu; `training`, `variants` and `serving` run parts of benchmarks/gpu.py. A part ends after eight
minutes, or `--seconds`, and writes its output and a record to FOLDER/results. After `--has`, name only packages whose
version on the GPU machine is not older than here: the tests need the versions that are installed here.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("heedful", "tests", "benchmarks", "scripts", "pyproject.toml", "README.md", "LICENSE")
TESTS = (
    "pytest",
    "pytest-xdist",
    "pytest-timeout",
    "hypothesis",
    "beartype",
    "transformers",
    "sentence-transformers",
    "accelerate",
    "psutil",
    "pillow",
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def canonical(name: str) -> str:
    """Return the name of a package as indexes write it.

    >>> canonical("Typing_Extensions")
    'typing-extensions'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of installed packages and of all packages that they need, without extras, by name.

    Args:
        names: Names of packages; those that are not installed are left out.
        without: Packages that are left out, with all packages that only they need.
    """
    left_out, waiting = set(map(canonical, without)), list(map(canonical, names))
    versions: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name in versions or name in left_out:
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        versions[name] = package.version
        for requirement in package.requires or ():
            specification, _, marker = requirement.partition(";")
            if "extra" not in marker and (match := NAME.match(specification.strip())):
                waiting.append(canonical(match[0]))
    return versions


def write_code(folder: Path) -> None:
    """Write the files of the last commit, and its hash to COMMIT.

    Raises:
        SystemExit: If the checkout has uncommitted changes.
    """
    git = ("git", "-C", str(ROOT))
    if subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout:
        raise SystemExit("the checkout has uncommitted changes, which a record could not name: commit them first")
    archive = subprocess.run([*git, "archive", "--format=tar", "HEAD", *CODE], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    (folder / "COMMIT").write_text(commit, encoding="utf-8")
    shutil.copy(ROOT / "heedful/_version.py", folder / "heedful/_version.py")


def write_packages(archive: Path, packages: dict[str, str], python: str) -> None:
    """Write an archive of packages, half as large as their wheels, and print the names of those without a wheel.

    Args:
        archive: The file to write.
        packages: Versions of the packages, by name.
        python: The version of Python that will import them, such as "3.12".
    """
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch, "wheels"), Path(scratch, "site")
        for name, version in sorted(packages.items()):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            command += ["--python-version", python, "--dest", str(wheels), f"{name}=={version}"]
            for platform in PLATFORMS:
                command += ["--platform", platform]
            if subprocess.run(command, check=False).returncode:
                print(f"no wheel of {name} {version} for Python {python}: left out")
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as contents:
                contents.extractall(site)
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(site, "site")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the folder and print its size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine")
    parser.add_argument("--has", nargs="*", default=[], help="packages that the GPU machine has, besides torch")
    parser.add_argument("--no-packages", action="store_true", help="write no archive: the GPU machine has all packages")
    options = parser.parse_args(arguments)
    if options.folder.exists():
        raise SystemExit(f"{options.folder} exists: name a new folder")
    code = options.folder / "code"
    code.mkdir(parents=True)
    write_code(code)
    shutil.copy(ROOT / "scripts/run_gpu.py", options.folder / "run_gpu.py")
    if not options.no_packages:
        on_machine = [*options.has, *closure(["torch"]), "heedful"]
        needs = [NAME.match(text)[0] for text in metadata.requires("heedful") or () if "extra" not in text]  # type: ignore[index]
        write_packages(options.folder / "site.tar.xz", closure([*needs, *TESTS], on_machine), options.python)
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    command = f"python {options.folder.name}/run_gpu.py --part tests"
    print(f"{options.folder}: {size / 2**20:.1f} MiB. On the GPU machine: {command}")


if __name__ == "__main__":
    main()
