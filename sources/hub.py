"""How does a name of the Hugging Face Hub become files?

The library huggingface_hub fetches them: its cache, token, progress and HF_HUB_OFFLINE=1 are the user's own.
`sources/checkpoint.py` imports this file where it meets such a name, and not before.
"""

import fnmatch
import os
import sys
from pathlib import Path

from huggingface_hub import HfApi, constants, errors, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import disable_progress_bars

from lib.settings import UserError, is_first_process
from sources.formats import WEIGHT_FILES, as_user_error

BESIDE = ("config.json", "vocab.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json")
BESIDE += ("tokenizer.model", "tokenizer.txt")  # what is read beside weights
TIMEOUT = 6  # seconds that the Hub has for its first answer


def fetch(repo, revision=None, file=None):
    """The folder of a repository's files in the user's cache, never code, or its .gguf file."""
    with as_user_error(Path(repo)):
        try:
            commit, sizes = listing(repo, revision)
            names = chosen(repo, list(sizes), file)
            cached = [try_to_load_from_cache(repo, name, revision=commit) for name in names]
            if None in cached:
                if is_first_process():
                    size = sum(sizes[name] for name, path in zip(names, cached) if path is None)
                    print(f"not here: fetching {repo} from the Hub, {size / 1e9:.3g} GB", file=sys.stderr)
                if not sys.stderr.isatty():
                    disable_progress_bars()
                cached = [Path(snapshot_download(repo, revision=revision, allow_patterns=names), names[0])]
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
            reason = f"no model {repo!r} here, and the Hub answers {type(error).__name__}"
            terms = f"accept its terms at {constants.ENDPOINT}/{repo}"
            raise UserError(f"{reason}: check name and version, {terms}, or type `hf auth login`") from None
    path = Path(cached[0])
    return path.parent if path.name in WEIGHT_FILES else path


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
        return Path(folder).name, dict.fromkeys(os.listdir(folder))


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
