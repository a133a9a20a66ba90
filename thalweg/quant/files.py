"""Where a checkpoint says how it is quantized: config.json, or a file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from thalweg.core.errors import CheckpointError
from thalweg.core.files import read_object

FIELD = "quantization_config"
MODELOPT, GPTQ = "hf_quant_config.json", "quantize_config.json"  # files of ModelOpt and older GPTQ tools
# methods of a config.json beside ModelOpt's file, and how the names of the algorithms begin that they agree with
EXPORTED = {"modelopt": "", "fp8": "FP8", "w4afp8": "MIXED"}
FIELDS = "quant_algo", "bits", "group_size", "desc_act", "sym"  # that two files may not say differently


def with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A config.json's content whose `quantization_config` says what the folder's files say.

    Raises CheckpointError for a broken file, and for two that contradict each other.
    """
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    found = config.get(FIELD) or config.get("compression_config") or inner.get(FIELD)
    if found is not None and not isinstance(found, dict):
        return config  # the reader of config.json refuses it
    exported, older = _read(folder / MODELOPT), _read(folder / GPTQ)
    own = exported.get("quantization", None if exported else {})
    if not isinstance(own, dict):
        raise CheckpointError(f"{folder / MODELOPT}: quantization must be an object, got {own!r}")
    if not found:
        found = {"quant_method": "modelopt", **exported} if exported else {"quant_method": "gptq", **older}
        return {**config, FIELD: found} if exported or older else config
    begins = [begin for method, begin in EXPORTED.items() if str(found.get("quant_method")).startswith(method)]
    if own and not str(own.get("quant_algo")).startswith(tuple(begins)):
        _contradicts(folder / MODELOPT, "quant_algo", own.get("quant_algo"), found.get("quant_method"))
    for name, theirs in ((MODELOPT, own), (GPTQ, older)):
        for field in FIELDS:
            if None not in (theirs.get(field), found.get(field)) and theirs[field] != found[field]:
                _contradicts(folder / name, field, theirs[field], found[field])
    return {**config, FIELD: found}


def _contradicts(path: Path, field: str, theirs: Any, ours: Any) -> NoReturn:
    raise CheckpointError(f"{path} says {field} {theirs!r}, and config.json {ours!r}: remove the one that is wrong")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
