"""Where a checkpoint says how it is quantized: config.json, or a file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thalweg.core.errors import CheckpointError
from thalweg.core.files import read_object

FIELD = "quantization_config"
MODELOPT, GPTQ = "hf_quant_config.json", "quantize_config.json"  # files of ModelOpt and older GPTQ tools


def with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A config.json's content whose `quantization_config` says what the folder's files say.

    Raises CheckpointError for a broken file, and for two that contradict each other.
    """
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    found = config.get(FIELD) or config.get("compression_config") or inner.get(FIELD)
    if found is not None and not isinstance(found, dict):
        return config  # the reader of config.json refuses it
    exported = _read(folder / MODELOPT)
    if exported:
        own = exported.get("quantization")
        if not isinstance(own, dict):
            raise CheckpointError(f"{folder / MODELOPT}: quantization must be an object, got {own!r}")
        ours, theirs = own.get("quant_algo"), (found or {}).get("quant_algo", own.get("quant_algo"))
        if ours != theirs:
            raise CheckpointError(
                f"{folder / MODELOPT} says quant_algo {ours!r}, and config.json {theirs!r}: remove the one that is"
                " wrong"
            )
    if not found and exported:
        found = {"quant_method": "modelopt", **exported}
    if not found and (older := _read(folder / GPTQ)):
        found = {"quant_method": "gptq", **older}
    return {**config, FIELD: found} if found else config


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
