"""Compiled kernels as an archive: what comes back, and what is refused."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import pytest

from thalweg.cli import main
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine import caches
from thalweg.launch import cache_archive
from thalweg.launch.cache_archive import export_cache, import_cache

HOPPER = {
    "thalweg": "1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "sgl-deep-gemm": "",
    "cuda": "13.0",
    "architecture": "sm_90",
}
FILES = {
    "triton/KEY/_gemv.cubin": b"gemv",
    "triton/warm-0123": b"",
    "deep_gemm/cache/kernel.a.1/kernel.cubin": b"dense",
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of this machine, to change."""
    versions = dict(HOPPER)
    monkeypatch.setattr(caches, "versions", lambda: versions)
    for variable in caches.FOLDERS:
        monkeypatch.setenv(variable, "unused")  # so that it is what it was afterwards
    return versions


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def archive(path: Path, *members: tarfile.TarInfo, manifest: Any = None) -> Path:
    """An archive with these members, of four bytes each, behind a manifest."""
    head = tarfile.TarInfo("manifest.json")
    text = json.dumps(manifest or cache_archive.manifest()).encode()
    head.size = len(text)
    with tarfile.open(path, "w:gz") as out:
        out.addfile(head, io.BytesIO(text))
        for member in members:
            member.size = 4 if member.isfile() else 0
            out.addfile(member, io.BytesIO(b"evil") if member.isfile() else None)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


def test_what_is_exported_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target, file = write(tmp_path / "source", FILES), tmp_path / "target", tmp_path / "kernels.tar.gz"
    write(source, {"deep_gemm/tmp/uuid/kernel.cu": b"unfinished", "elsewhere": b"no kernel"})
    (source / "deep_gemm/toolchain").mkdir()
    (source / "deep_gemm/toolchain/cccl").symlink_to("/usr/include")
    file.write_bytes(b"an older archive")
    assert main(["warmup", "--cache-dir", str(source), "--export", str(file)]) == 0
    assert main(["warmup", "--cache-dir", str(target), "--import", str(file)]) == 0
    assert read(target) == FILES and "3 files" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_archive_is_refused_whole(tmp_path: Path, seed: int) -> None:
    file = tmp_path / "a.tar.gz"
    export_cache(str(write(tmp_path / "source", {f"triton/K{i}/x.cubin": b"kernel" * 999 for i in range(9)})), file)
    content = bytearray(file.read_bytes())
    content[random.Random(seed).randrange(20, len(content))] ^= 0x10
    file.write_bytes(content)
    try:
        import_cache(str(tmp_path / "target"), file)
    except UnsupportedConfig:
        assert read(tmp_path / "target") == {}
    else:  # the byte was the time of the archive, say
        assert read(tmp_path / "target") == read(tmp_path / "source")


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    export_cache(str(write(tmp_path / "source", FILES)), tmp_path / "a.tar.gz")
    own = {"triton/KEY/_gemv.cubin": b"own", "triton/OTHER/x.cubin": b"x"}
    import_cache(str(write(tmp_path / "target", own)), tmp_path / "a.tar.gz")
    assert read(tmp_path / "target") == FILES | own


def test_each_difference_is_named(tmp_path: Path, machine: dict[str, str]) -> None:
    export_cache(str(write(tmp_path / "source", FILES)), tmp_path / "a.tar.gz")
    machine |= {"torch": "2.13.0", "architecture": "sm_100"}
    expected = "compiled for torch 2.11.0, here 2.13.0; architecture sm_90, here sm_100. Compile here"
    with pytest.raises(UnsupportedConfig, match=expected):
        import_cache(str(tmp_path / "target"), tmp_path / "a.tar.gz")
    assert read(tmp_path / "target") == {}


def test_deep_gemm_in_another_folder_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = cache_archive.manifest() | {"deep_gemm_folder": "/opt/venv/deep_gemm"}
    assert import_cache(str(tmp_path / "target"), archive(tmp_path / "a.tar.gz", manifest=there)) == 0
    assert "for one installed in /opt/venv/deep_gemm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "bad",
    [
        member("triton/../../escape"),
        member("/triton/escape"),
        member("other/escape"),
        member("triton"),
        member("triton/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("triton/hard", tarfile.LNKTYPE, "triton/ok"),
        member("triton/device", tarfile.CHRTYPE),
        member("triton/fifo", tarfile.FIFOTYPE),
        member("triton/folder", tarfile.DIRTYPE),
    ],
    ids=lambda one: str(one.name),
)
def test_members_that_are_no_files_of_a_cache_folder_are_refused(bad: tarfile.TarInfo, tmp_path: Path) -> None:
    file = archive(tmp_path / "a.tar.gz", member("triton/ok"), bad)
    with pytest.raises(UnsupportedConfig, match="nothing was imported"):
        import_cache(str(tmp_path / "deep" / "target"), file)
    assert set(read(tmp_path)) == {"a.tar.gz"}


def test_a_cut_archive_changes_nothing(tmp_path: Path) -> None:
    file = archive(tmp_path / "a.tar.gz", *(member(f"triton/{i}/x") for i in range(100)))
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(UnsupportedConfig, match="a.tar.gz"):
        import_cache(str(tmp_path / "target"), file)
    assert read(tmp_path / "target") == {}


@pytest.mark.parametrize("manifest", [{"format": 2, "versions": {}}, {"format": 1}, [1], "x"])
def test_another_kind_of_archive_is_refused(manifest: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfig, match="not an archive of thalweg warmup --export"):
        import_cache(str(tmp_path / "target"), archive(tmp_path / "a.tar.gz", manifest=manifest))


def test_files_that_cannot_be_read_are_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    for name in ("missing", "text"):
        with pytest.raises(UnsupportedConfig, match=f"--import .*{name}"):
            import_cache(str(tmp_path / "target"), tmp_path / name)
    with pytest.raises(UnsupportedConfig, match="holds no kernels"):
        export_cache(str(tmp_path / "empty"), tmp_path / "a.tar.gz")
