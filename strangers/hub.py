"""How does a name of the Hugging Face Hub become files?

The library huggingface_hub fetches them: its cache, token, progress and HF_HUB_OFFLINE=1 are the user's own.
What is read in parts (`strangers/ranges.py`) stands beside its own files.
"""

import contextlib
import fnmatch
import os
import sys
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, snapshot_download, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars

from lib.files import as_user_error
from lib.settings import UserError, rank
from strangers import ranges
from strangers.formats import WEIGHT_FILES

BESIDE = ("config.json", "vocab.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json")
BESIDE += ("tokenizer.model", "tokenizer.txt")  # what is read beside weights
TIMEOUT = 6  # seconds that the Hub has for its first answer


def fetch(repo, revision=None, file=None, in_parts=False):
    """The folder of a repository's files in the user's cache, never code, or its .gguf file.

    If `in_parts`, weights that are not there are fetched when they are read (`strangers/ranges.py`).
    """
    with as_user_error(Path(repo)):
        try:
            commit, sizes = listing(repo, revision)
            names = chosen(repo, list(sizes), file)
            weights = [name for name in names if name.endswith((".safetensors", ".gguf"))]
            fetch_files = fetch_parts if in_parts and weights else fetch_whole
            path = fetch_files(repo, revision, commit, {name: sizes[name] for name in names})
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            reason = f"no model {repo!r} here, and the Hub answers {type(error).__name__}"
            terms = f"accept its terms at {constants.ENDPOINT}/{repo}"
            raise UserError(f"{reason}: check name and version, {terms}, or type `hf auth login`") from None
    return path.parent if path.name in WEIGHT_FILES else path


def cached(repo, commit, names):
    """The paths of files in the cache, None for those that are not there."""
    return [try_to_load_from_cache(repo, name, revision=commit) for name in names]


def fetch_whole(repo, revision, commit, sizes):
    """Fetch files, of these sizes by name; the path of the first."""
    paths = cached(repo, commit, sizes)
    if None not in paths:
        return Path(paths[0])
    if rank() == 0:
        size = sum(size for size, path in zip(sizes.values(), paths) if path is None)
        print(f"not here: fetching {repo} from the Hub, {size / 1e9:.3g} GB", file=sys.stderr)
    if not sys.stderr.isatty():
        disable_progress_bars()
    return Path(snapshot_download(repo, revision=revision, allow_patterns=[*sizes]), [*sizes][0])


def fetch_parts(repo, revision, commit, sizes):
    """The same, but of weights that are not there their beginnings; all of them, if no ranges are sent."""
    weights = [name for name in sizes if name.endswith((".safetensors", ".gguf"))]
    if None not in cached(repo, commit, weights):
        return fetch_whole(repo, revision, commit, sizes)
    beside = {name: size for name, size in sizes.items() if name not in weights}
    if beside:
        snapshot = fetch_whole(repo, revision, commit, beside).parent
    else:  # a lone .gguf: the cache notes all the same which commit the revision is
        snapshot = Path(snapshot_download(repo, revision=revision, allow_patterns=[]))
        snapshot.mkdir(parents=True, exist_ok=True)
    folder = parts_folder(repo, commit)
    for name in weights:
        ranges.begin(folder / name, sizes[name])
    try:
        ranges.fetch([(folder / name, 0, ranges.BLOCK) for name in weights])
    except ranges.NoRanges as error:
        for name in weights:
            (folder / name).unlink()
            ranges.blocks_of(folder / name).unlink()
        if rank() == 0:
            print(f"{error}: {repo} is fetched whole", file=sys.stderr)
        return fetch_whole(repo, revision, commit, sizes)
    for name in beside:
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(snapshot / name)
    return folder / [*sizes][0]


def parts_folder(repo, commit):
    """Where in the cache a repository's files are that are fetched in parts."""
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo, repo_type="model"), "parts", commit)


def listing(repo, revision):
    """A repository's commit, and its files' sizes by name: the Hub's, or the cache's without a network."""
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT)
        return info.sha, {file.rfilename: file.size for file in info.siblings}
    except errors.HfHubHTTPError:  # the Hub's answer
        raise
    except Exception as error:
        try:
            folder = snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[])
        except errors.LocalEntryNotFoundError:
            remedy = "fetch it by `hf download` where there is a network, or name a folder"
            raise UserError(f"{repo} is not here, and the Hub is out of reach, {error!r}: {remedy}") from None
        commit = Path(folder).name
        in_parts = filter(ranges.is_by_blocks, parts_folder(repo, commit).glob("*"))
        sizes = {path.name: path.stat().st_size for path in in_parts}
        return commit, dict.fromkeys(os.listdir(folder)) | sizes


def chosen(repo, there, file):
    """Those of a repository's files that are read, the weights in the format that `transformers` prefers."""
    for first in WEIGHT_FILES:
        if first in there and file is None:
            stem, kind, *index = first.split(".")
            shards = fnmatch.filter(there, f"{stem}-*-of-*.{kind}") if index else []
            return [first, *shards, *(name for name in BESIDE if name in there)]
    files = fnmatch.filter(there, "*.gguf")
    if file in files or (file is None and len(files) == 1):
        return [file or files[0]]
    expected = f"safetensors, pytorch_model.bin or one .gguf file; {repo}/FILE.gguf names one of several"
    raise UserError(f"{repo} has {', '.join(sorted(files or there)[:9])}: expected {expected}")
