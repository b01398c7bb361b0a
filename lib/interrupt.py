"""Why does Ctrl-C print no traceback while the libraries load? Scripts import this file before any other.

Loading torch takes seconds. Until `run_script` begins, an interrupt ends the process as it ends any command.
Figures are files here: a backend that a notebook has set for matplotlib would need a notebook.
"""

import os
import signal
import sys
from pathlib import Path

HOUSE = Path(__file__).parent.parent
script = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
if script.parent in (HOUSE, HOUSE / "lib", HOUSE / "reproduce"):  # and no notebook, and no test
    os.environ["MPLBACKEND"] = "agg"
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored, as behind `&`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
