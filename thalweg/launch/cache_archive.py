"""`thalweg warmup --export` and `--import`: compiled kernels as one archive, for machines with equal GPUs and
versions.

The archive is a .tar.gz. Its first member, `manifest.json`, says what the kernels were compiled for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

from thalweg.core.errors import UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.engine import caches
from thalweg.launch.doctor import driver_version

MANIFEST, FORMAT = "manifest.json", 1
# folders that stay here: kernels that DeepGEMM still compiles, and which compiler it runs, which is this machine's
PRIVATE = "tmp", "toolchain"
WARM = "triton/warm-"  # beginning of the names of marks that say that no kernel of a configuration is missing


def manifest() -> dict[str, Any]:
    """Of this machine. Kernels depend on `versions`. DeepGEMM's also have its folder in their names."""
    spec = importlib.util.find_spec("deep_gemm")
    folder = str(Path(spec.origin).parent) if spec and spec.origin else ""
    return {"format": FORMAT, "versions": caches.versions(), "driver": driver_version(), "deep_gemm_folder": folder}


def folders(cache_dir: str) -> dict[str, Path]:
    """The compilers' cache folders by their names in an archive."""
    caches.use(cache_dir)
    return {name: Path(os.environ[variable]) for variable, name in caches.FOLDERS.items()}


def export_cache(cache_dir: str, file: Path) -> int:
    """Writes the archive, and replaces `file` once it is complete. Returns the exit status. Raises
    UnsupportedConfig.
    """
    found = [
        (f"{name}/{path.relative_to(root)}", path) for name, root in folders(cache_dir).items() for path in _files(root)
    ]
    if not found:
        raise UnsupportedConfig("--export: the cache folder holds no kernels; run thalweg warmup MODEL first")
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".export-") as folder:
            complete = Path(folder, file.name)
            with tarfile.open(complete, "w:gz", compresslevel=3) as archive:
                text = json.dumps(manifest(), indent=2).encode()
                head = tarfile.TarInfo(MANIFEST)
                head.size = len(text)
                archive.addfile(head, BytesIO(text))
                for name, path in found:
                    archive.add(path, name, recursive=False)
            os.replace(complete, file)
    except OSError as error:
        raise UnsupportedConfig(f"--export {file}: {error}") from error
    print(f"{len(found)} files, {format_bytes(file.stat().st_size)}: {file}")
    return 0


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink() and not set(PRIVATE) & set(path.relative_to(root).parts):
            yield path


def import_cache(cache_dir: str, file: Path) -> int:
    """Unpacks an archive beside the cache folders, and moves it in once it is complete; files that are there stay.

    Returns the exit status. Raises UnsupportedConfig for kernels of another machine or version, and for an archive that
    holds anything but files of the cache folders.
    """
    targets = folders(cache_dir)
    parent = targets["triton"].parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with (
            tarfile.open(file, "r:gz") as archive,
            tempfile.TemporaryDirectory(dir=parent, prefix="import-") as staging,
        ):
            notes = check_manifest(archive, file)
            count = 0
            while (member := archive.next()) is not None:
                if notes and member.name.startswith(WARM):
                    continue
                _extract(archive, member, Path(staging), tuple(targets))
                count += 1
            assert archive.fileobj is not None, "the archive is open"
            while archive.fileobj.read(1 << 20):  # gzip compares its checksum at the end only
                pass
            for name, target in targets.items():
                _merge(Path(staging, name), target)
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise UnsupportedConfig(f"--import {file}: {error}") from error
    print("\n".join([f"{count} files are in {parent}: give thalweg serve the flags of the warm-up.", *notes]))
    return 0


def check_manifest(archive: tarfile.TarFile, file: Path) -> list[str]:
    """Reads the first member. Returns notes. Raises UnsupportedConfig that names each difference."""
    first = archive.next()
    content = archive.extractfile(first) if first is not None and first.name == MANIFEST and first.isfile() else None
    try:
        theirs = json.loads(content.read()) if content is not None else {}
        is_known = theirs["format"] == FORMAT and isinstance(theirs["versions"], dict)
    except (ValueError, KeyError, TypeError):
        is_known = False
    if not is_known:
        raise UnsupportedConfig(f"--import {file}: not an archive of thalweg warmup --export of this version")
    own = manifest()
    pairs = {name: (theirs["versions"].get(name, ""), value) for name, value in own["versions"].items()}
    wrong = [f"{name} {one or 'none'}, here {other or 'none'}" for name, (one, other) in pairs.items() if one != other]
    if wrong:
        raise UnsupportedConfig(f"--import {file}: compiled for {'; '.join(wrong)}. Compile here: thalweg warmup MODEL")
    folder = theirs.get("deep_gemm_folder", "")
    if folder == own["deep_gemm_folder"]:
        return []
    return [f"DeepGEMM's kernels will be compiled again: they are for one installed in {folder or 'no folder'}."]


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, staging: Path, names: tuple[str, ...]) -> None:
    """Writes a member below `staging`."""
    path = PurePosixPath(member.name)
    if (
        not member.isfile()
        or path.is_absolute()
        or ".." in path.parts
        or len(path.parts) < 2
        or path.parts[0] not in names
        or set(PRIVATE) & set(path.parts)
    ):
        raise UnsupportedConfig(f"--import: {member.name!r} is not a file of a cache folder; nothing was imported")
    target, content = staging / path, archive.extractfile(member)
    assert content is not None, "a regular file has content"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "xb") as out:
        shutil.copyfileobj(content, out)


def _merge(source: Path, target: Path) -> None:
    """Moves what `target` lacks, a folder as a whole where it can, so that a reader sees complete kernels."""
    if not source.exists():
        return
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, target)
    elif source.is_dir() and target.is_dir():
        for path in source.iterdir():
            _merge(path, target / path.name)
