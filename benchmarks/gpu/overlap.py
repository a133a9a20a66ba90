"""How long the GPU idles between decode steps while the server really runs.

    python benchmarks/gpu/overlap.py --model FOLDER [--batch 1 256] [--steps 200] [--out overlap.json] [--keep FOLDER]
    [-- flags of `thalweg serve`]

Starts `thalweg serve` with dummy weights, keeps as many streams decoding as asked for, profiles the engine over
/start_profile (kernels and copies only), and measures the gap at each end of a step: from the end of its last kernel,
which settles the sampled tokens, to the start of the next kernel; and to the next copy or kernel, whichever comes
first. With --keep a profile of a few steps more is left in that folder, for Perfetto. The aim is a gap under 30 us in
the median and 100 us in 99 of 100.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import httpx

from thalweg.bench.metrics import percentile
from thalweg.bench.results import provenance

PORT, KEY = 30188, "overlap"
LAST = "settle"  # in the name of the kernel that ends B
INPUT, CONTEXT = 1024, 4096
KEPT = 6  # steps of a profile that is kept
AIM = {"p50_us": 30.0, "p99_us": 100.0}


def gaps(trace: dict[str, Any]) -> dict[str, list[float]]:
    """Microseconds between steps, to the next kernel and to the next work of any kind, on the stream of the steps."""
    work = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ends = [e for e in work if LAST in e["name"]]
    if not ends:
        names = sorted({e["name"][:60] for e in work})
        raise SystemExit(f"the trace has no kernel named like {LAST!r}: {names[:40]}")
    stream = ends[0]["args"]["stream"]
    work = sorted((e for e in work if e["args"]["stream"] == stream), key=lambda e: e["ts"])
    found: dict[str, list[float]] = {"to_kernel": [], "to_work": [], "step": []}
    last = None
    for i, event in enumerate(work):
        if LAST not in event["name"]:
            continue
        over = event["ts"] + event["dur"]
        behind = work[i + 1 :]
        if not behind:
            break
        kernel = next((e for e in behind[:8] if e["cat"] == "kernel"), None)
        if kernel is not None:
            found["to_kernel"].append(max(kernel["ts"] - over, 0.0))
        found["to_work"].append(max(behind[0]["ts"] - over, 0.0))
        if last is not None:
            found["step"].append(over - last)
        last = over
    return found


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "samples": len(ordered),
        "p50_us": round(percentile(ordered, 50), 2),
        "p99_us": round(percentile(ordered, 99), 2),
        "max_us": round(ordered[-1], 2),
    }


async def trace(client: httpx.AsyncClient, url: str, steps: int, folder: Path) -> dict[str, Any]:
    """A profile of the next steps."""
    before = set(folder.glob("*.gz"))
    head = {"Authorization": f"Bearer {KEY}"}
    body = {"num_steps": steps, "activities": ["GPU"]}
    (await client.post(url + "/start_profile", json=body, headers=head)).raise_for_status()
    for _ in range(300):
        await asyncio.sleep(0.2)
        for made in set(folder.glob("*.gz")) - before:
            try:
                found: dict[str, Any] = json.loads(gzip.decompress(made.read_bytes()))
                return found
            except (EOFError, gzip.BadGzipFile, zlib.error, json.JSONDecodeError):
                continue  # it is being written
    raise SystemExit(f"no profile of {steps} steps within a minute")


async def profiled(url: str, batch: int, steps: int, vocab: int, folder: Path, keep: Path | None) -> dict[str, Any]:
    """Streams of `batch` requests, the profile of `steps` steps among them."""
    rng = random.Random(batch)
    output = CONTEXT - INPUT - 1  # none ends before the profile does

    async def stream(client: httpx.AsyncClient, seen: list[int]) -> None:
        prompt = [rng.randrange(1000, vocab) for _ in range(INPUT)]
        body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0, "stream": True}
        async with client.stream("POST", url + "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                seen[0] += 1

    limits = httpx.Limits(max_connections=batch + 4)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        seen = [[0] for _ in range(batch)]
        tasks = [asyncio.create_task(stream(client, one)) for one in seen]
        begun = time.monotonic()
        while min(one[0] for one in seen) < 3 and time.monotonic() - begun < 60:
            await asyncio.sleep(0.05)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            few = await trace(client, url, KEPT, folder)
            few.pop("traceName", None)  # a file that is no more
            (keep / f"decode_batch_{batch}.trace.json.gz").write_bytes(gzip.compress(json.dumps(few).encode()))
        made = await trace(client, url, steps, folder)
        running = sum(not task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    found = {name: summary(values) for name, values in gaps(made).items() if values}
    reached = all(found["to_kernel"][name] < most for name, most in AIM.items())
    return {**found, "streams": running, "aim": AIM, "reached": reached}


def main() -> None:
    argv = sys.argv[1:]
    own, serve = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="overlap.json")
    parser.add_argument("--keep", type=Path)
    said = parser.parse_args(own)
    vocab = json.loads((Path(said.model) / "config.json").read_text())["vocab_size"]
    url = f"http://127.0.0.1:{PORT}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "thalweg", "serve", "--model", said.model, "--load-format", "dummy"]
        command += [
            "--port",
            str(PORT),
            "--max-running-requests",
            str(max(said.batch)),
            "--context-length",
            str(CONTEXT),
        ]
        command += ["--profile-folder", folder, "--admin-api-key", KEY, *serve]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            for _ in range(240):
                try:
                    if httpx.get(url + "/ready", timeout=2).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
            results = []
            for batch in said.batch:
                found = asyncio.run(profiled(url, batch, said.steps, vocab, Path(folder), said.keep))
                results.append({"model": Path(said.model).name, "batch": batch, "context": INPUT, **found})
                print(json.dumps(results[-1]), flush=True)
        finally:
            server.terminate()
            server.wait(60)
    about = provenance("", [], {})
    about["command"] = (
        f"python benchmarks/gpu/overlap.py --model {Path(said.model).name} --steps {said.steps} "
        + shlex.join(["--batch", *map(str, said.batch), *(["--", *serve] if serve else [])])
    )
    Path(said.out).write_text(json.dumps({"results": results, **about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
