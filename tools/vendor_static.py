"""The libraries of the chat page: fetches their files from npm again, or checks the committed ones.

    python -m tools.vendor_static --check             the files have the checksums of the manifest
    python -m tools.vendor_static                     fetch the versions of the manifest again
    python -m tools.vendor_static dompurify@3.4.18    fetch this version, and write it to the manifest

Fetching needs `npm`. A file that npm delivers with another checksum for the same version is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "thalweg" / "server" / "static" / "vendor"
MANIFEST = FOLDER / "manifest.json"
MAX_BYTES = 700_000  # of all files together


def problems(folder: Path = FOLDER) -> list[str]:
    """What is wrong with the files of a folder, by its manifest; empty if they are as they should be."""
    packages = json.loads((folder / MANIFEST.name).read_text(encoding="utf-8"))
    files = {name: entry["sha256"] for package in packages for name, entry in package["files"].items()}
    present = {path.name for path in folder.iterdir()} - {MANIFEST.name}
    found = [f"{name}: missing" for name in sorted(files.keys() - present)]
    found += [f"{name}: not in the manifest" for name in sorted(present - files.keys())]
    found += [
        f"{name}: another checksum" for name in sorted(files.keys() & present) if _sha256(folder / name) != files[name]
    ]
    if (size := sum((folder / name).stat().st_size for name in present)) > MAX_BYTES:
        found.append(f"{size:,} bytes in all; at most {MAX_BYTES:,}")
    return found


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(package: dict[str, Any], version: str) -> None:
    """Writes the files of one package and its entry in the manifest. Raises SystemExit for another checksum."""
    with tempfile.TemporaryDirectory() as folder:
        spec = f"{package['name']}@{version}"
        subprocess.run(["npm", "pack", spec, "--silent", "--pack-destination", folder], check=True, text=True)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name, entry in package["files"].items():
                member = tar.extractfile(f"package/{entry['from']}")
                assert member is not None, f"{spec} has no file {entry['from']}"
                content = member.read()
                digest = hashlib.sha256(content).hexdigest()
                if version == package["version"] and entry.get("sha256") not in (None, digest):
                    raise SystemExit(f"{spec}: {entry['from']} has another checksum than the manifest says")
                (FOLDER / name).write_bytes(content)
                entry["sha256"] = digest
    package["version"] = version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="NAME@VERSION", help="packages that get another version")
    parser.add_argument("--check", action="store_true", help="compare the committed files with the manifest")
    args = parser.parse_args()
    if not args.check:
        packages = json.loads(MANIFEST.read_text(encoding="utf-8"))
        wanted = dict(spec.rsplit("@", 1) for spec in args.packages)
        if unknown := wanted.keys() - {package["name"] for package in packages}:
            parser.error(f"not in {MANIFEST.name}: {', '.join(sorted(unknown))}")
        for package in packages:
            if not wanted or package["name"] in wanted:
                fetch(package, wanted.get(package["name"], package["version"]))
        MANIFEST.write_text(json.dumps(packages, indent=2) + "\n", encoding="utf-8")
    found = problems()
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
