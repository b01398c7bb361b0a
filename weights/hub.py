"""How does a name of the Hugging Face Hub become files?

The library huggingface_hub fetches them: its cache, token, progress and HF_HUB_OFFLINE=1 are the user's own.
What is read in parts (`weights/ranges.py`) stands beside its own files.
"""

import contextlib
import fnmatch
import sys
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, snapshot_download, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import disable_progress_bars

from lib.files import as_user_error
from lib.settings import UserError, rank
from weights import ranges
from weights.files import INDEX, WEIGHT_FILES, indexed_names
from weights.vocabulary import VOCABULARIES

BESIDE = (
    "config.json",
    "answer.json",
    "tokenizer_config.json",
    "tokenizer.txt",
    *VOCABULARIES,
)  # what is read, too
IN_PARTS = (".safetensors", ".gguf")  # how names of files end that can be read in parts
TIMEOUT = 6  # seconds that the Hub has for its first answer


def fetch(repo, revision=None, file=None, in_parts=False):
    """The folder of a repository's files in the user's cache, never code, or its .gguf file.

    If `in_parts`, weights that are not there are fetched when they are read (`weights/ranges.py`).
    """
    with as_user_error(Path(repo)):
        try:
            commit, sizes = listing(repo, revision)
            names = []
            if file is None and INDEX in sizes:
                folder = fetch_whole(repo, revision, commit, {INDEX: sizes[INDEX]}, is_told=False)
                names = files_of_index(folder / INDEX, sizes)
            names = names or chosen(repo, list(sizes), file)
            whole, parts = {}, {}
            for name in names:
                is_read_in_parts = in_parts and name.endswith(IN_PARTS)
                (parts if is_read_in_parts else whole)[name] = sizes[name]
            if None not in cached(repo, commit, parts):
                whole, parts = whole | parts, {}
            folder = fetch_whole(repo, revision, commit, whole)
            if parts:
                folder = fetch_parts(parts_folder(repo, commit), parts, folder)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            reason = f"no model {repo!r} here, and the Hub answers {type(error).__name__}"
            terms = f"accept its terms at {constants.ENDPOINT}/{repo}"
            raise UserError(f"{reason}: check name and version, {terms}, or type `hf auth login`") from None
    return folder / names[0] if names[0].endswith(".gguf") else folder


def cached(repo, commit, names):
    """The paths of files in the cache, None for those that are not there."""
    return [try_to_load_from_cache(repo, name, revision=commit) for name in names]


def fetch_whole(repo, revision, commit, sizes, is_told=True):
    """Fetch files, of these sizes by name; their folder, which notes of which revision they are."""
    paths = cached(repo, commit, sizes)
    if paths and None not in paths:
        return Path(paths[0].removesuffix([*sizes][0]))
    if paths and is_told and rank() == 0:
        size = sum(size for size, path in zip(sizes.values(), paths) if path is None)
        print(f"not here: fetching {repo} from the Hub, {size / 1e9:.3g} GB", file=sys.stderr)
    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[*sizes]))
    folder.mkdir(parents=True, exist_ok=True)  # where no file was fetched
    return folder


def fetch_parts(folder, sizes, snapshot):
    """Fetch the beginnings of files, of these sizes by name, into a folder, which leads to a snapshot's."""
    for name, size in sizes.items():
        ranges.begin(folder / name, size)
    ranges.fetch([(folder / name, 0, min(ranges.NEAR, size)) for name, size in sizes.items()])
    for path in snapshot.iterdir():
        with contextlib.suppress(FileExistsError):
            (folder / path.name).symlink_to(path)
    return folder


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
            remedy = "fetch it by `hf download` where there is a network, or name a folder by its path"
            raise UserError(f"{repo} is not here, and the Hub is out of reach, {error!r}: {remedy}") from None
        commit = Path(folder).name
        found = [*Path(folder).iterdir(), *parts_folder(repo, commit).glob("*")]
        return commit, {path.name: path.stat().st_size for path in found}


def files_of_index(path, there):
    """The files that an index names, it, and what is read beside; [] if not all are there."""
    indexed = {*indexed_names(path).values()}
    if not indexed or not indexed <= there.keys():
        return []
    return [*sorted(indexed), INDEX, *(name for name in BESIDE if name in there)]


def chosen(repo, there, file):
    """Those of a repository's files that are read, the weights in the format that `transformers` prefers."""
    for pattern in WEIGHT_FILES if file is None else ():
        names = fnmatch.filter(there, pattern)
        if names:
            return [*names, *(name for name in BESIDE if name in there)]
    files = fnmatch.filter(there, "*.gguf")
    if file in files or (file is None and len(files) == 1):
        return [file or files[0]]
    expected = f"safetensors, pytorch_model.bin or one .gguf file; {repo}/FILE.gguf names one of several"
    raise UserError(f"{repo} has {', '.join(sorted(files or there)[:9])}: expected {expected}")
