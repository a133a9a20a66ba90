"""The files of a checkpoint, and its resolution: config.json, generation_config.json, tokenizer_config.json, headers
and index of its tensors.

An input is {"files": {name: content}}: a JSON value, or the text of the bytes (characters 0 to 255). A file *.safetensors
is its header; zeros stand for the data, as much as its offsets ask for. What is not among them is the bundled model's.
The result is a resolved configuration with the schemes of its tensors, or an error of one line that names a file; both
within seconds and some hundred MB.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from thalweg.config.machine import Machine
from thalweg.config.tree import options_of
from thalweg.core.errors import CheckpointError, ThalwegError
from thalweg.launch.resolve import resolve
from thalweg.models.catalog import read_facts
from thalweg.weights.stream import schemes_in
from tools.fuzz.http import MODEL
from tools.fuzz.mutate import dump, mutate_bytes, mutate_value
from tools.fuzz.target import Target

MACHINE = Machine("a CPU", 2, 8 << 30, 8 << 30)
SECONDS, MEMORY, MAX_DATA, MAX_ERROR = 10.0, 600 << 10, 1 << 20, 3000  # of CPU; KB of growth; bytes; characters


class CheckpointFiles(Target):
    packages = ("config/model.py", "models/catalog.py", "launch", "weights/stream.py", "quant/catalog.py", "text/tokenizer.py",
                "text/template.py", "text/chat.py")  # fmt: skip

    def __enter__(self) -> CheckpointFiles:
        self.folder = Path(tempfile.mkdtemp(prefix="thalweg-fuzz-"))
        signal.signal(signal.SIGPROF, _too_long)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)

    def run(self, entry: Any) -> str:
        for path in self.folder.iterdir():
            path.unlink()
        for path in MODEL.iterdir():
            if path.suffix == ".json":
                (self.folder / path.name).symlink_to(path)
        for name, content in entry["files"].items():
            self._write(self.folder / name, content)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            outcome = self._resolve()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < MEMORY, f"{grown} KB of memory"
        return outcome

    def _resolve(self) -> str:
        try:
            resolve(options_of(model=str(self.folder), load_format="dummy"), MACHINE, progress=False)
            schemes_in(self.folder, read_facts(self.folder).quantization_config)
        except ThalwegError as error:
            text = str(error)
            assert text and "\n" not in text and len(text) < MAX_ERROR, f"an error of several lines: {text!r}"
            is_named = any(path.name in text for path in (self.folder, *self.folder.iterdir()))
            assert is_named or not isinstance(error, CheckpointError), f"it names no file: {text}"
            return type(error).__name__
        return "resolved"

    @staticmethod
    def _write(path: Path, content: Any) -> None:
        path.unlink(missing_ok=True)
        data = content.encode("latin-1", "replace") if isinstance(content, str) else json.dumps(content).encode()
        if path.suffix != ".safetensors" or isinstance(content, str):
            path.write_bytes(data)
            return
        ends = [0]
        for spec in content.values() if isinstance(content, dict) else ():
            offsets = spec.get("data_offsets") if isinstance(spec, dict) else None
            ends += [end for end in offsets if type(end) is int and end < MAX_DATA] if isinstance(offsets, list) else []
        path.write_bytes(len(data).to_bytes(8, "little") + data)
        with path.open("r+b") as file:
            file.truncate(8 + len(data) + max(ends))

    def mutate(self, entry: Any, draw: random.Random, donor: Any) -> Any:
        files, others = dict(entry["files"]), donor["files"]
        if draw.random() < 0.1:
            files |= others
        name = draw.choice(list(files))
        content = files[name]
        if isinstance(content, str) or draw.random() < 0.05:
            text = content if isinstance(content, str) else dump(content, draw)
            files[name] = mutate_bytes(text, draw)
        else:
            other = others.get(name)
            files[name] = mutate_value(content, draw, draw.choice(list(others.values())) if other is None else other)
        return {"files": files}


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"more than {SECONDS:g} s")
