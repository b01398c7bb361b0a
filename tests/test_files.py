"""lib/files.py: only regular files of a sane size are opened; a failure leaves what was there."""

import os

import pytest

from lib import files
from lib.settings import UserError


def test_what_is_no_regular_file_of_a_sane_size(tmp_path):
    """Refused before it is opened: opening a pipe would wait for ever, reading a device would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 30 * 2**30)  # which the disk does not hold
    reasons = dict.fromkeys(("pipe", "device", "folder"), "not a regular file")
    reasons |= {"nowhere": "missing", "gone": "missing"}
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            files.read_json(tmp_path / name)
    (tmp_path / "small").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to(tmp_path / "small")
    assert files.read_json(tmp_path / "link") == {"a": 1}


@pytest.mark.parametrize("text", ["", "[1]", "[" * 200_000])
def test_what_is_no_json_object(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match="a.json"):
        files.read_json(tmp_path / "a.json")


@pytest.mark.parametrize("error, told", [(RuntimeError(), RuntimeError), (OSError(28, "full"), UserError)])
def test_a_failure_leaves_the_old_file(error, told, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(told), files.atomic_file(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_folder(tmp_path):
    path = tmp_path / "run"
    for process in (os.getpid(), 2**22 + 1):  # killed: in containers numbers come again; none has this one
        left = tmp_path / f".run.{process}.tmp"
        left.mkdir()
        (left / "torn").touch()
    for name in ("old", "whole"):
        with files.atomic_folder(path) as new:
            (new / name).touch()
        with pytest.raises(RuntimeError), files.atomic_folder(path) as new:
            (new / "torn").touch()
            raise RuntimeError
        assert sorted(tmp_path.rglob("*")) == [path, path / name]
    live = tmp_path / f".run.{os.getppid()}.tmp"
    live.mkdir()
    with files.atomic_folder(path):
        pass
    assert live.exists()
