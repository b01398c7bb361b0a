"""The short version of tests/hostile.py: what a hostile folder or a bad command line can do."""

from conftest import run_script


def test_some_cases():
    done = run_script("tests/hostile.py", 8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 faults" in done.stdout
