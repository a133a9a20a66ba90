"""Finds a checkpoint: a folder on this machine, or `org/name` on the model hub, fetched into the hub's cache.

Two steps, so that a model that cannot be served is refused before its weights are fetched: `locate` brings
configuration and tokenizer, `fetch_weights` the safetensors files that the index names. The hub's own variables count:
HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE. A connection that breaks is resumed where it broke; an interrupted
fetch, called again, skips the files that were complete.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from thalweg.config.bundled import NAME as BUNDLED
from thalweg.config.bundled import find_bundled
from thalweg.config.setting import nearest
from thalweg.core.errors import CheckpointError
from thalweg.weights.index import INDEX, read_weight_map

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
TEXTS = ("*.json", "*.jinja", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """folder: where its files lie. repo: its name on the hub, "" for a local folder; commit: the hub's, "" for a local
    folder.
    """

    folder: Path
    repo: str = ""
    commit: str = ""


def locate(model: str, revision: str | None = None, token: str | None = None) -> Checkpoint:
    """The folder of `model`, with its configuration and tokenizer but perhaps without weights. Raises
    CheckpointError.
    """
    folder = Path(find_bundled(model)).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"{model} is a folder: only models of the hub have revisions ({revision}); leave one of them out"
            )
        return Checkpoint(folder)
    if folder.exists():
        raise CheckpointError(
            f"{model} is a file: give the folder of the checkpoint, with config.json and *.safetensors in it"
        )
    if not NAME.match(model):
        problem = f"{model}: no such folder, and not an org/name of the model hub: check the path"
        raise CheckpointError(_with_suggestion(problem, model))
    found = _fetch(model, revision, token, TEXTS)
    if not (found / "config.json").is_file():
        raise CheckpointError(f"{model} on the hub has no config.json: it is not a model in the Hugging Face layout")
    return Checkpoint(found, model, found.name)


def pull(repo: str, revision: str | None = None, token: str | None = None) -> Path:
    """Downloads a model into the hub's cache, and returns its folder there. Raises CheckpointError."""
    if Path(repo).is_dir():
        raise CheckpointError(f"{repo} is a folder here: there is nothing to download")
    checkpoint = locate(repo, revision, token)
    fetch_weights(checkpoint, token)
    return checkpoint.folder


def cached_folder(model: str) -> Path:
    """The folder of a model in the hub's cache, or `model` itself as a path. Nothing is downloaded."""
    folder = Path(find_bundled(model)).expanduser()
    if folder.is_dir() or not NAME.match(model):
        return folder
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else folder


def _with_suggestion(problem: str, model: str) -> str:
    """The error for a model that was not found: names the folder that was probably meant, and only without one says the
    problem, with the model of the hub's cache whose name is most like this one.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    if guess := _nearest_folder(Path(model).expanduser()):
        return f"{model}: no such folder; did you mean {guess}?"
    cached = [path.name.removeprefix("models--").replace("--", "/") for path in Path(HF_HUB_CACHE).glob("models--*")]
    guess = nearest(model, [name for name in cached if name != model])
    return problem + (f"; did you mean {guess}?" if guess else "")


def _nearest_folder(model: Path) -> str:
    """The checkpoint beside the path, or the bundled one, that is most like it; "" where none is. Parent and name must
    be alike, since any two folders of one parent have similar paths; a bare name has no parent to compare.
    """
    bare, parent = len(model.parts) == 1, str(model.parent)
    folders = [*(path.parent for path in model.parent.glob("*/config.json")), Path(BUNDLED)]
    alike = {path.name: path for path in folders if bare or nearest(parent, [str(path.parent)])}
    guess = nearest(model.name, alike)
    return str(alike[guess]) if guess and alike[guess] != model else ""


def fetch_weights(checkpoint: Checkpoint, token: str | None = None) -> None:
    """Brings the safetensors files of a checkpoint from the hub into its folder; nothing to do for a local one. Raises
    CheckpointError.
    """
    if not checkpoint.repo:
        return
    wanted = _weight_files(checkpoint.folder)
    _fetch(checkpoint.repo, checkpoint.commit, token, wanted)
    if lost := missing_weights(checkpoint.folder):
        raise CheckpointError(f"{checkpoint.repo} on the hub lacks {', '.join(lost)}: its upload is not complete")


def missing_weights(folder: Path) -> list[str]:
    """Names or patterns of weight files that are not in the folder. Raises CheckpointError for a broken index."""
    return [name for name in _weight_files(folder) if not any(folder.glob(name))]


def _weight_files(folder: Path) -> tuple[str, ...]:
    """Names or patterns of the weight files: what the index names, else all safetensors files."""
    try:
        return tuple(sorted(set(read_weight_map(folder / INDEX).values())))
    except FileNotFoundError:
        return ("*.safetensors",)


def _fetch(repo: str, revision: str | None, token: str | None, patterns: tuple[str, ...]) -> Path:
    """Downloads what matches of a revision, no subfolders; returns the snapshot's folder, which is named by its
    commit.
    """
    import httpx2  # what the hub library speaks HTTP with: its connection errors pass through
    from huggingface_hub import errors, snapshot_download

    at = f"{repo} at {revision}" if revision else repo
    try:
        path = snapshot_download(
            repo, revision=revision, token=token, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its terms on its page, then give --hf-token or HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        problem = (
            f"{repo}: no such folder, and the model hub has no such model, or it is private: check the name, and give"
            " --hf-token or HF_TOKEN if it needs one"
        )
        raise CheckpointError(_with_suggestion(problem, repo)) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo} has no revision {revision}: give a branch, tag or commit that its page shows"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        problem = (
            f"{at}: no such folder; the model hub cannot be reached, and its local cache lacks files of this model."
            " Check the path, or the network (HF_ENDPOINT, HF_HUB_OFFLINE)"
        )
        raise CheckpointError(_with_suggestion(problem, repo)) from error
    except errors.HfHubHTTPError as error:
        raise CheckpointError(f"the hub refused {at}: {error}") from error
    except (OSError, httpx2.HTTPError) as error:
        raise CheckpointError(
            f"{at} could not be fetched: {error}; start again to go on from the files that are complete"
        ) from error
    return Path(path)
