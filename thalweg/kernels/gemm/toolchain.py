"""The compiler of DeepGEMM's kernels: which nvcc or NVRTC of this machine compiles them, with which include folders.

DeepGEMM compiles at run time. It runs `DG_JIT_NVCC_COMPILER`, or `$CUDA_HOME/bin/nvcc`. With `DG_JIT_USE_NVRTC=1` it
uses NVRTC, which looks for headers in `$CUDA_HOME/include` alone. Toolkits of CUDA 13 and pip's wheels have `cuda/std`
in `include/cccl`, so NVRTC needs a folder that links both.

`candidates` lists compilers, `probe` compiles a small source with one, `choose` takes the first that works.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

NVCC, NVRTC = "nvcc", "NVRTC"
OLDEST = 12, 9  # older ones lack sm_90a's family, and are slower by DeepGEMM's own account
ARCH = "sm_90a"
TIMEOUT = 120.0  # seconds for nvcc on a busy machine
SOURCE = """\
#include <cuda/std/cstdint>
#include <cuda_fp8.h>
extern "C" __global__ void probe(__nv_fp8_e4m3* out, cuda::std::uint32_t x) { out[x] = __nv_fp8_e4m3(float(x)); }
"""
VARIABLES = "CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "DG_JIT_USE_NVRTC", "CPATH"


class Compiler(NamedTuple):
    """A candidate."""

    kind: str  # NVCC or NVRTC
    file: str  # nvcc, or NVRTC's library
    home: str  # the toolkit's folder
    includes: tuple[str, ...] = ()  # folders beside those that it knows itself


class ProbeResult(NamedTuple):
    """A compiler that was tried."""

    compiler: Compiler
    version: str
    error: str = ""  # why it does not work; "": it does

    def __str__(self) -> str:
        headers = f", headers in {' and '.join(self.compiler.includes)}" if self.compiler.includes else ""
        text = f"{self.compiler.kind} {self.version or '?'} ({self.compiler.file}{headers})"
        return f"{text}: {self.error}" if self.error else text


# ---- finding


def toolkits(environment: Mapping[str, str], local: Path = Path("/usr/local")) -> list[Path]:
    """Folders that may have `bin/nvcc`, `include` or `lib`: the user's, the system's with the newest first, pip's."""
    nvcc = shutil.which("nvcc", path=environment.get("PATH", ""))
    given = [environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), nvcc and Path(nvcc).resolve().parent.parent]
    newest = sorted(local.glob("cuda-*"), key=lambda path: [*map(int, re.findall(r"\d+", path.name))], reverse=True)
    spec = importlib.util.find_spec("nvidia")
    wheels = (
        [path for folder in spec.submodule_search_locations or () for path in Path(folder).glob("*")] if spec else []
    )
    folders = [*(Path(path) for path in given if path), local / "cuda", *newest, *sorted(wheels)]
    return list(dict.fromkeys(path.resolve() for path in folders if path.is_dir()))


def header_folders(folders: Sequence[Path]) -> list[tuple[str, ...]]:
    """For each toolkit with `cuda_fp8.h`: the include folders that hold it and `cuda/std`. Toolkits with both come
    first.
    """
    standard = [
        path
        for folder in folders
        for path in (folder / "include" / "cccl", folder / "include")
        if (path / "cuda/std/cstdint").is_file()
    ]
    complete, mixed = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for include in (folder / "include" for folder in folders):
        if standard and (include / "cuda_fp8.h").is_file():
            own = next((path for path in standard if path.is_relative_to(include)), None)
            paths = dict.fromkeys((str(include), str(own or standard[0])))
            (complete if own else mixed).append(tuple(paths))
    return complete + mixed


def candidates(environment: Mapping[str, str], folders: Sequence[Path]) -> list[Compiler]:
    """All compilers in the order in which to try them: nvcc, nvcc with foreign headers, NVRTC.

    DG_JIT_USE_NVRTC and DG_JIT_NVCC_COMPILER of the environment leave only what they name.
    """
    headers, given = header_folders(folders), environment.get("DG_JIT_NVCC_COMPILER")
    nvrtc = environment.get("DG_JIT_USE_NVRTC", "")
    nvccs = [Path(given)] if given else [folder / "bin" / "nvcc" for folder in folders]
    homes = [(str(nvcc), str(nvcc.parent.parent)) for nvcc in nvccs if nvcc.is_file()]
    libraries = [next(iter(sorted(folder.glob("lib*/libnvrtc.so.1[23]"), reverse=True)), None) for folder in folders]
    named = [(str(library), headers_of) for library, headers_of in product(libraries, headers) if library]
    result = [Compiler(NVCC, nvcc, home) for nvcc, home in homes]
    result += [Compiler(NVCC, nvcc, home, headers[0]) for nvcc, home in homes if headers]
    result = [] if nvrtc not in ("", "0") else result
    if nvrtc != "0":
        result += [Compiler(NVRTC, library, str(Path(library).parents[1]), of) for library, of in named]
    return result


# ---- trying


def probe(compiler: Compiler) -> ProbeResult:
    """Compiles a small source that includes what DeepGEMM's kernels include."""
    try:
        return _probe_nvcc(compiler) if compiler.kind == NVCC else _probe_nvrtc(compiler)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return ProbeResult(compiler, "", str(error))


def _probe_nvcc(compiler: Compiler) -> ProbeResult:
    said = subprocess.run([compiler.file, "--version"], capture_output=True, text=True, timeout=TIMEOUT).stdout
    numbers = re.search(r"release (\d+)\.(\d+)", said)
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    name = ".".join(map(str, version))
    if version < OLDEST:
        return ProbeResult(compiler, name, f"older than {'.'.join(map(str, OLDEST))}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text(SOURCE)
        command = [compiler.file, str(source), "-cubin", "-o", f"{folder}/probe.cubin", "-std=c++20", f"-arch={ARCH}"]
        environment = os.environ | variables(compiler, os.environ)
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    return ProbeResult(compiler, name, _first_error(done.stderr) if done.returncode else "")


def _probe_nvrtc(compiler: Compiler) -> ProbeResult:
    library, program = load_nvrtc(compiler.file), ctypes.c_void_p()
    major, minor, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={ARCH}", "-std=c++20", *(f"-I{path}" for path in compiler.includes)]
    arguments = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    library.nvrtcCreateProgram(ctypes.byref(program), SOURCE.encode(), b"probe.cu", 0, None, None)
    failed = library.nvrtcCompileProgram(program, len(options), arguments)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    error = _first_error(log.value.decode(errors="replace")) if failed else ""
    return ProbeResult(compiler, f"{major.value}.{minor.value}", error)


def load_nvrtc(file: str) -> ctypes.CDLL:
    """The library, after the one that it looks for by name and would not find outside the system's folders."""
    for path in Path(file).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(path))
    return ctypes.CDLL(file)


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it failed without a word")


# ---- choosing


def choose(folder: Path, environment: Mapping[str, str], compilers: Sequence[Compiler]) -> list[ProbeResult]:
    """Tries compilers until one works, which is the last of the result; the others have an error.

    folder: keeps the choice for the next start, as long as the compilers and the user's variables are the same.
    """
    stamps = [(*one, Path(one.file).stat().st_mtime_ns if Path(one.file).is_file() else 0) for one in compilers]
    state = json.dumps([SOURCE, stamps, [environment.get(name) for name in VARIABLES]])
    file, key = folder / "choice.json", hashlib.sha256(state.encode()).hexdigest()
    try:
        kept = json.loads(file.read_text())
        kind, path, home, includes = kept["compiler"]
        compiler = Compiler(kind, path, home, tuple(includes))
        if kept["key"] == key and compiler in compilers:
            return [ProbeResult(compiler, kept["version"])]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or written by another version
    trials: list[ProbeResult] = []
    for compiler in compilers:
        trials.append(probe(compiler))
        if not trials[-1].error:
            replace_text(file, json.dumps({"key": key, "compiler": compiler, "version": trials[-1].version}))
            break
    return trials


def replace_text(file: Path, text: str) -> None:
    """Writes a file at once, so that another process reads all of it or the one before. Ignores a full or read-only
    disk.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as made:
            made.write(text)
        os.replace(made.name, file)
    except OSError:
        pass


@cache
def trials_here() -> tuple[ProbeResult, ...]:
    """`choose` on this machine."""
    return tuple(choose(choice_folder(), os.environ, candidates(os.environ, toolkits(os.environ))))


def choice_folder() -> Path:
    """The folder of the choice, beside DeepGEMM's kernels."""
    return Path(os.environ.get("DG_JIT_CACHE_DIR") or "~/.deep_gemm").expanduser() / "toolchain"


# ---- using


def variables(compiler: Compiler, environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that make DeepGEMM use this compiler, without CUDA_HOME. Those that the user set stay."""
    if compiler.kind == NVRTC:
        return {"DG_JIT_USE_NVRTC": "1"}
    paths = [path for path in environment.get("CPATH", "").split(os.pathsep) if path]
    added = [path for path in compiler.includes if path not in paths]
    return {"DG_JIT_NVCC_COMPILER": compiler.file} | ({"CPATH": os.pathsep.join([*paths, *added])} if added else {})


def cuda_home(compiler: Compiler, folder: Path) -> str:
    """The CUDA_HOME to give DeepGEMM. For NVRTC its `include` links the entries of all include folders.

    folder: where such a folder is made.
    """
    if compiler.kind == NVCC or compiler.includes == (f"{compiler.home}/include",):
        return compiler.home
    home = folder / f"headers-{hashlib.sha256(repr(compiler.includes).encode()).hexdigest()[:12]}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder))
        (made / "include").mkdir()
        for name, entry in _entries(compiler.includes):
            (made / "include" / name).symlink_to(entry)
        try:
            made.rename(home)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return str(home)


def _entries(includes: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Names and paths; of two with one name the first."""
    return iter({path.name: path for include in reversed([*includes]) for path in Path(include).iterdir()}.items())


@contextmanager
def for_import() -> Iterator[None]:
    """Sets what DeepGEMM reads: CUDA_HOME while it is imported, the other variables for good, since it reads them at
    its first compilation. Raises ImportError where no compiler works.
    """
    trials = trials_here()
    if not trials or trials[-1].error:
        raise ImportError(
            f"no compiler for DeepGEMM's kernels works here ({'; '.join(map(str, trials)) or 'none found'})"
        )
    compiler, before = trials[-1].compiler, os.environ.get("CUDA_HOME")
    os.environ.update(variables(compiler, os.environ))
    os.environ["CUDA_HOME"] = cuda_home(compiler, choice_folder())
    if compiler.kind == NVRTC:
        load_nvrtc(compiler.file)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_HOME"]
        else:
            os.environ["CUDA_HOME"] = before
