"""lib/files.py: only regular files of a sane size are opened; a failure leaves what was there."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
from safetensors import SafetensorError

from lib import checkpoint, files
from lib.settings import UserError

# ---- read --------------------------------------------------------------------------------------------------


def test_what_is_no_regular_file(tmp_path):
    """Refused before it is opened: opening a pipe would wait for ever, reading a device would never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("pipe", "device", "folder"):
        with pytest.raises(UserError, match=f"{name}: it is no regular file"):
            files.read_bytes(tmp_path / name)
    for name in ("nowhere", "gone"):
        with pytest.raises(UserError, match=f"{name} is missing"):
            files.read_bytes(tmp_path / name)
    with pytest.raises(UserError, match="cannot read"):
        files.read_bytes(tmp_path / "zero\0byte")


def test_what_is_closed_to_us():
    """As a user who is not root, to whom no mode closes anything."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step_0000001").mkdir()
        (folder / "a.json").write_text("{}")
        (folder / "a.json").chmod(0)
        was = os.geteuid()
        try:
            for mode in (0o755, 0):
                folder.chmod(mode)
                if was == 0:
                    os.seteuid(65534)
                with pytest.raises(UserError, match="denied"):
                    files.read_json(folder / "a.json")
                if mode == 0:
                    with pytest.raises(UserError, match="denied"):
                        checkpoint.load(folder)
                    assert checkpoint.steps(folder) == []
                os.seteuid(was)
        finally:
            os.seteuid(was)
            folder.chmod(0o755)


def test_a_file_of_any_size(tmp_path):
    """Thirty gigabytes of nothing, which the disk does not hold; a link to a regular file is one."""
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 30 * 2**30)
    with pytest.raises(UserError, match="32,212,254,720 bytes"):
        files.read_json(tmp_path / "large")
    (tmp_path / "small").write_text('{"a": 1}')
    (tmp_path / "link").symlink_to(tmp_path / "small")
    assert files.read_json(tmp_path / "link") == {"a": 1}


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "null", "[" * 200_000, '{"a": ' * 200_000, "1" * 9999])
def test_what_is_no_json_object(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match="a.json"):
        files.read_json(tmp_path / "a.json")


# ---- written whole, or not at all --------------------------------------------------------------------------


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    with files.atomic_file(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()
    with pytest.raises(RuntimeError), files.atomic_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("was_there", [False, True])
def test_a_failure_leaves_the_old_folder(tmp_path, was_there):
    path = tmp_path / "run"
    if was_there:
        with files.atomic_folder(path) as new:
            (new / "old").write_text("all")
    with pytest.raises(RuntimeError), files.atomic_folder(path) as new:
        (new / "torn").write_text("half")
        raise RuntimeError
    left = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")]
    assert left == (["run", "run/old"] if was_there else [])
    with files.atomic_folder(path) as new:
        (new / "whole").write_text("all")
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")] == ["run", "run/whole"]


def test_a_folder_that_a_process_of_our_number_left_half_written(tmp_path):
    left = tmp_path / f".run.{os.getpid()}.tmp"  # as in containers, where numbers come again
    left.mkdir()
    (left / "torn").write_text("half")
    with files.atomic_folder(tmp_path / "run") as new:
        (new / "whole").write_text("all")
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["whole"]
    assert not left.exists()


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    (tmp_path / ".loss.csv.123.tmp").write_text("")
    (tmp_path / ".step_0000001.45.tmp").mkdir()
    (tmp_path / ".step_0000001.45.tmp" / "x").write_text("")
    (tmp_path / ".step_0000001.old.tmp").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / ".link.3.tmp").symlink_to("outside")
    kept = [".lock", "notes.7.tmp", "step_0000001"]
    for name in kept:
        (tmp_path / name).mkdir()
    files.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".link.3.tmp", "outside", *kept])


def test_sha256(tmp_path):
    (tmp_path / "abc").write_text("abc")  # the example of FIPS 180-2, Appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files.sha256(tmp_path / "abc") == expected


def test_a_full_disk_is_told(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UserError, match="cannot write .*No space left"), files.atomic_file(tmp_path / "a"):
        raise full
    with pytest.raises(UserError, match="cannot write .*No space left"), files.atomic_folder(tmp_path / "a"):
        raise SafetensorError(f"Error while serializing: I/O error: {full.strerror} (os error {full.errno})")
    assert list(tmp_path.iterdir()) == []
