"""How does a name of the Hugging Face Hub become files?

The library huggingface_hub fetches them: its cache, token, progress and HF_HUB_OFFLINE=1 are the user's own.
`lib/checkpoint.py` imports this file where it meets such a name, and not before.
"""

import fnmatch
import os
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from os.path import isfile
from pathlib import Path

import filelock
from huggingface_hub import HfApi, constants, errors, hf_hub_download, snapshot_download
from huggingface_hub.utils import disable_progress_bars

from lib.formats import WEIGHT_FILES, as_user_error
from lib.settings import UserError

BESIDE = ("config.json", "vocab.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json")
BESIDE += ("tokenizer.model", "tokenizer.txt")  # what is read beside weights
PATIENCE = 6  # seconds that the Hub has for its first answer


def fetch(repo, revision=None, file=None):
    """The folder of a repository's files in the user's cache, or its .gguf file; UserError if it has none.

    The files are config.json, the tokenizer and the weights in one format, or one .gguf; never code.
    """
    # under torchrun one process fetches, and the others wait
    lock = Path(tempfile.gettempdir(), f"bornbiased-{os.getuid()}-{repo.replace('/', '--')}.lock")
    with as_user_error(Path(repo)), filelock.FileLock(lock):
        try:
            commit, there = listing(repo, revision)
            names = chosen(repo, there, file)
            plans = [hf_hub_download(repo, name, revision=commit, dry_run=True) for name in names]
            folder = Path(plans[0].local_path).parent
            if not all(isfile(plan.local_path) for plan in plans):
                size = sum(plan.file_size for plan in plans if plan.will_download)
                print(f"not here: fetching {repo} from the Hub, {size / 1e9:.3g} GB", file=sys.stderr)
                if not sys.stderr.isatty():
                    disable_progress_bars()
                folder = Path(snapshot_download(repo, revision=revision, allow_patterns=names))
        except errors.GatedRepoError:
            terms = f"accept its terms at {constants.ENDPOINT}/{repo}"
            raise UserError(f"{repo} is gated: {terms}, then type `hf auth login`") from None
        except errors.RepositoryNotFoundError:
            remedy = "check the name, or type `hf auth login` if it is private"
            raise UserError(f"no model {repo!r}, neither here nor on the Hub: {remedy}") from None
        except errors.RevisionNotFoundError:
            raise UserError(f"{repo} has no commit, branch or tag {revision!r}") from None
    return folder if names[0] in WEIGHT_FILES else folder / names[0]


def listing(repo, revision):
    """A repository's commit and its files' names: the Hub's, or the cache's where there is no network."""
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
        return Path(folder).name, os.listdir(folder)


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
    expected = (
        f"model.safetensors, pytorch_model.bin or one .gguf file; {repo}/FILE.gguf names one of several"
    )
    raise UserError(f"{repo} has {', '.join(sorted(files or there)[:9])}: expected {expected}")
