"""Why does Ctrl-C print no traceback while the libraries load? Scripts import this file before any other.

Loading torch takes seconds. Until `run_script` begins, an interrupt ends the process as it ends any command.
"""

import signal
import sys
from pathlib import Path

HOUSE = Path(__file__).parent.parent
script = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
if script.parent in (HOUSE, HOUSE / "lib", HOUSE / "reproduce"):  # and no notebook, and no test
    signal.signal(signal.SIGINT, signal.SIG_DFL)
