"""Downloads packed folders from Hugging Face's hub, and uploads them (needs the extra `fdg[hub]`)."""

import re
from pathlib import Path
from typing import Any

from fdg.errors import FdgError, one_line

SCHEME = "hf://"
_PATTERNS = ("config.json", "summary.json", "metrics.jsonl", "checkpoints/**")  # files to download


def download(address: str) -> Path:
    """Downloads `hf://USER/NAME` or `hf://USER/NAME@REVISION` into a cache; returns the folder."""
    name, _, revision = address.removeprefix(SCHEME).partition("@")
    hub = import_hub(address, name)
    try:
        commit = hub.HfApi().repo_info(name, revision=revision or None).sha
        folder = Path(hub.constants.HF_HOME) / "fdg" / name.replace("/", "--") / str(commit)
        hub.snapshot_download(name, revision=commit, local_dir=folder, allow_patterns=list(_PATTERNS))
    except Exception as error:  # an error of the library, of HTTP, or of the disk
        raise _hub_error(f"{address} cannot be read", error) from error
    return folder


def upload(folder: Path, name: str) -> str:
    """Uploads a packed folder to a repository of the hub, creating it if missing; returns its address."""
    hub = import_hub(f"--push {name}", name)
    try:
        hub.HfApi().create_repo(name, exist_ok=True)
        hub.HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Add a packed run of fdg")
    except Exception as error:
        raise _hub_error(f"--push {name} failed; the packed folder {folder} is complete", error) from error
    return f"{SCHEME}{name}"


def import_hub(context: str, name: str) -> Any:
    """Checks the name of a repository; returns the module `huggingface_hub`. Errors begin with `context`."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise FdgError(f"{context}: give USER/NAME, the name of a repository on Hugging Face's hub")
    try:
        import huggingface_hub
    except ImportError:
        raise FdgError(f"{context} needs huggingface_hub: pip install 'fdg[hub]'") from None
    return huggingface_hub


def _hub_error(context: str, error: Exception) -> FdgError:
    return FdgError(
        f"{context} ({one_line(error)}): check the name, `hf auth whoami` and the network; a packed folder"
        " can also be copied in other ways"
    )
