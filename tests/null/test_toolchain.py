"""The choice of DeepGEMM's compiler, on folders and compilers that are made up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thalweg.kernels.gemm import toolchain
from thalweg.kernels.gemm.toolchain import NVCC, NVRTC, Compiler

NVCC_SCRIPT = """\
#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release {version}, V{version}.88"; exit 0;; esac
for folder in {include} $(echo "$CPATH" | tr : ' '); do test -e "$folder/cuda/std/cstdint" && exit 0; done
echo "$1(1): fatal error: cuda/std/cstdint: No such file or directory" >&2; exit 1
"""


def toolkit(folder: Path, version: str = "", cccl: str = "", nvrtc: bool = False) -> Path:
    """A toolkit's folder. version: of its nvcc, "" for none. cccl: where `cuda/std` is below the folder."""
    (folder / "include").mkdir(parents=True)
    (folder / "include/cuda_fp8.h").touch()
    if cccl:
        (folder / cccl / "cuda/std").mkdir(parents=True)
        (folder / cccl / "cuda/std/cstdint").touch()
    if version:
        (folder / "bin").mkdir()
        nvcc = folder / "bin/nvcc"
        nvcc.write_text(NVCC_SCRIPT.format(version=version, include=folder / "include/cccl"))
        nvcc.chmod(0o755)
    if nvrtc:
        (folder / "lib").mkdir()
        (folder / "lib/libnvrtc.so.13").touch()
    return folder.resolve()


def test_the_users_toolkit_comes_first_and_then_the_newest(tmp_path: Path) -> None:
    own, old, new = (toolkit(tmp_path / name) for name in ("mine", "local/cuda-12.9", "local/cuda-13.0"))
    found = toolchain.toolkits({"CUDA_HOME": str(own)}, tmp_path / "local")
    assert [path for path in found if path.is_relative_to(tmp_path)] == [own, new, old]


def test_toolkits_with_all_headers_come_first(tmp_path: Path) -> None:
    bare = toolkit(tmp_path / "bare")
    full = toolkit(tmp_path / "full", cccl="include/cccl")
    flat = toolkit(tmp_path / "flat", cccl="include")
    cccl = str(full / "include/cccl")
    expected = [(f"{full}/include", cccl), (f"{flat}/include",), (f"{bare}/include", cccl)]
    assert toolchain.header_folders([bare, full, flat]) == expected
    assert toolchain.header_folders([bare]) == []


def test_nvcc_is_tried_before_nvrtc_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    folders = [toolkit(tmp_path / "cuda", "13.0", "include/cccl", nvrtc=True)]

    def kinds(environment: dict[str, str]) -> list[str]:
        return [compiler.kind for compiler in toolchain.candidates(environment, folders)]

    assert kinds({}) == [NVCC, NVCC, NVRTC]
    assert kinds({"DG_JIT_USE_NVRTC": "1"}) == [NVRTC]
    assert kinds({"DG_JIT_USE_NVRTC": "0"}) == [NVCC, NVCC]
    given = toolkit(tmp_path / "given", "12.9") / "bin/nvcc"
    named = toolchain.candidates({"DG_JIT_NVCC_COMPILER": str(given)}, folders)
    assert [compiler.file for compiler in named if compiler.kind == NVCC] == [str(given)] * 2


def test_an_nvcc_without_headers_gets_those_of_another_toolkit(tmp_path: Path) -> None:
    bare = toolkit(tmp_path / "bare", "13.0")
    wheel = toolkit(tmp_path / "nvidia/cu13", cccl="include/cccl")
    trials = toolchain.choose(tmp_path / "kept", {}, toolchain.candidates({}, [bare, wheel]))
    assert [trial.compiler.kind for trial in trials] == [NVCC, NVCC]
    assert "cuda/std/cstdint" in trials[0].error and not trials[1].error
    assert trials[1].compiler.includes == (f"{wheel}/include", f"{wheel}/include/cccl")
    set_for_it = toolchain.variables(trials[1].compiler, {"CPATH": "/mine"})
    assert set_for_it["CPATH"] == f"/mine:{wheel}/include:{wheel}/include/cccl"


@pytest.mark.parametrize(
    ("version", "error"), [("12.8", "older than 12.9"), ("12.10", ""), ("12.9", ""), ("13.0", ""), ("", "No such file")]
)
def test_an_old_nvcc_is_not_used(version: str, error: str, tmp_path: Path) -> None:
    folder = toolkit(tmp_path / "cuda", version, "include/cccl")
    trial = toolchain.probe(Compiler(NVCC, f"{folder}/bin/nvcc", str(folder)))
    assert trial.error == error if not error or version else error in trial.error


def test_a_library_that_is_none_is_an_error_and_no_crash(tmp_path: Path) -> None:
    folder = toolkit(tmp_path / "cuda", nvrtc=True)
    trial = toolchain.probe(Compiler(NVRTC, f"{folder}/lib/libnvrtc.so.13", str(folder)))
    assert trial.error and str(trial).startswith("NVRTC ? (")


def test_the_choice_is_kept_until_a_compiler_or_the_users_variables_change(tmp_path: Path) -> None:
    folder = toolkit(tmp_path / "cuda", "13.0", "include/cccl")
    found, kept = toolchain.candidates({}, [folder]), tmp_path / "kept"
    first = toolchain.choose(kept, {}, found)
    nvcc = folder / "bin/nvcc"
    stamp = nvcc.stat().st_mtime_ns
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    os.utime(nvcc, ns=(stamp, stamp))
    assert toolchain.choose(kept, {}, found) == first, "it would fail, but it was not tried again"
    assert toolchain.choose(kept, {"CPATH": "/other"}, found)[-1].error
    os.utime(nvcc, ns=(stamp + 1, stamp + 1))
    assert toolchain.choose(kept, {}, found)[-1].error
    (kept / "choice.json").write_text("{")
    assert toolchain.choose(kept, {}, found)[-1].error, "a damaged file is ignored"


def test_nvrtc_gets_one_folder_with_the_headers_of_both(tmp_path: Path) -> None:
    wheel = toolkit(tmp_path / "nvidia/cu13", cccl="include/cccl", nvrtc=True)
    compiler = toolchain.candidates({"DG_JIT_USE_NVRTC": "1"}, [wheel])[0]
    home = Path(toolchain.cuda_home(compiler, tmp_path / "made"))
    assert (home / "include/cuda_fp8.h").is_file() and (home / "include/cuda/std/cstdint").is_file()
    assert toolchain.cuda_home(compiler, tmp_path / "made") == str(home), "made once"
    flat = toolkit(tmp_path / "flat", cccl="include", nvrtc=True)
    assert toolchain.cuda_home(toolchain.candidates({}, [flat])[-1], tmp_path / "made") == str(flat)


def test_cuda_home_is_set_for_the_import_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toolkit(tmp_path / "cuda", "13.0", "include/cccl")
    works = toolchain.probe(Compiler(NVCC, f"{folder}/bin/nvcc", str(folder)))
    for name in toolchain.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", "/mine")
    monkeypatch.setattr(toolchain, "trials_here", lambda: (works,))
    with toolchain.for_import():
        assert os.environ["CUDA_HOME"] == str(folder)
    assert os.environ["CUDA_HOME"] == "/mine" and os.environ.pop("DG_JIT_NVCC_COMPILER") == f"{folder}/bin/nvcc"
    monkeypatch.setattr(toolchain, "trials_here", lambda: (works._replace(error="it broke"),))
    with pytest.raises(ImportError, match="no compiler for DeepGEMM's kernels works here .*: it broke"):
        with toolchain.for_import():
            pass
