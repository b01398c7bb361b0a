"""How does a name of the Hugging Face Hub become files?

    >>> from lib import hub
    >>> hub.fetch("HuggingFaceTB/SmolLM2-135M")         # or ORG/NAME@COMMIT, or ORG/NAME/file.gguf
    PosixPath('/home/me/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/93efa2f...')

The library huggingface_hub fetches them: its cache, token, progress and HF_HUB_OFFLINE=1 are the user's own.
It is imported where a name of the Hub is met, and nowhere else.
"""

import fnmatch
import re
import sys
from multiprocessing.pool import ThreadPool
from os.path import isdir
from pathlib import Path

import filelock

from lib.formats import WEIGHT_FILES, as_user_error
from lib.settings import UserError

NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w.-]*))?(?:/(\w[\w.-]*\.gguf))?", re.ASCII)
FOLDERS = ("runs", "data", "models", "results")  # that a user has here, or will have
FILE = re.compile(r"\.(?:safetensors|bin|pth?|gguf|jsonl?|model|txt|py|png)$|/step_\d{7}$")
BESIDE = ("config.json", "generation_config.json", "vocab.json", "vocab.txt")  # what is read beside weights
BESIDE += ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.txt")
PATIENCE = 8  # seconds that the Hub has for its first answer
COMMITS = {}  # of each name that this process has read: the commit


def is_name(text):
    """May a text that is no path here be a name of the Hub? Never one that was meant for a path."""
    found = NAME.fullmatch(text)
    if found is None or (found[3] is None and FILE.search(text)):
        return False
    first = text.split("/")[0]
    return first not in FOLDERS and not isdir(first)


def fetch(name):
    """The folder or .gguf file of a name of the Hub, in the user's cache; UserError if it cannot be had.

    A folder has the configuration, the tokenizer and the weights in one format; code is never fetched.
    """
    from huggingface_hub import constants, errors

    repo, revision, file = NAME.fullmatch(name).groups()
    with as_user_error(Path(name)):
        try:
            commit, there = listing(repo, revision)
            names = chosen(repo, there, file)
            folder = download(repo, revision, commit, names)
        except errors.GatedRepoError:
            terms = f"accept its terms at {constants.ENDPOINT}/{repo}"
            raise UserError(f"{repo} is gated: {terms}, then type `hf auth login`") from None
        except errors.RepositoryNotFoundError:
            remedy = "check the name, or type `hf auth login` if it is private"
            raise UserError(f"no model {name!r}, neither here nor on the Hub: {remedy}") from None
    COMMITS[name] = folder.name
    return folder if names[0] in WEIGHT_FILES else folder / names[0]


def listing(repo, revision):
    """A repository's commit and its files' names: the Hub's, or the cache's where there is no network."""
    from huggingface_hub import HfApi, errors, snapshot_download

    try:
        # in a thread, since a name server or a firewall that is silent heeds no timeout
        info = ThreadPool(1).apply_async(HfApi().model_info, (repo,), {"revision": revision}).get(PATIENCE)
        return info.sha, [file.rfilename for file in info.siblings]
    except errors.HfHubHTTPError:  # the Hub's answer
        raise
    except Exception as error:
        try:
            folder = snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[])
        except errors.LocalEntryNotFoundError:
            remedy = "fetch it by `hf download` where there is a network, or name a folder"
            raise UserError(f"{repo} is not here, and the Hub is out of reach, {error!r}: {remedy}") from None
        return Path(folder).name, [path.name for path in Path(folder).iterdir()]


def chosen(repo, there, file):
    """Those of a repository's files that are read, the weights in the format that `transformers` prefers."""
    for first in WEIGHT_FILES:
        if first in there and file is None:
            stem, kind, *index = first.split(".")
            shards = fnmatch.filter(there, f"{stem}-*-of-*.{kind}") if index else []
            return [first, *shards, *(name for name in BESIDE if name in there)]
    files = fnmatch.filter(there, file or "*.gguf")
    if len(files) == 1:
        return files
    if files:
        raise UserError(f"{repo} has {len(files)} .gguf files: name one, as {repo}/{files[0]}")
    missing = file or "model.safetensors, pytorch_model.bin or .gguf file"
    raise UserError(f"{repo} has no {missing}: name a repository that has; here are {', '.join(there[:5])}")


def download(repo, revision, commit, names):
    """The folder in the cache that has a commit's files, after fetching those that are missing."""
    from huggingface_hub import constants, hf_hub_download, snapshot_download

    def plans():  # the library's, for each file; a cached one takes no request
        return [hf_hub_download(repo, name, revision=commit, dry_run=True) for name in names]

    paths = [Path(plan.local_path) for plan in plans()]
    if all(path.exists() for path in paths):
        return paths[0].parent
    locks = Path(constants.HF_HUB_CACHE, ".locks")
    locks.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(locks / "bornbiased.lock"):  # under torchrun one process fetches, the others wait
        size = sum(plan.file_size for plan in plans() if plan.will_download)
        if size:
            print(f"not here: fetching {repo} from the Hub, {size / 1e9:.3g} GB", file=sys.stderr)
        return Path(snapshot_download(repo, revision=revision, allow_patterns=names))
