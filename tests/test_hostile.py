"""The short version of tests/hostile.py: what a hostile folder or a bad command line can do."""

from conftest import run_script


def test_some_cases():
    """Stride 67 is no divisor of any group's size: every kind of folder and script has some."""
    done = run_script("tests/hostile.py", 67)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoint" in done.stdout and "spelled out" in done.stdout
