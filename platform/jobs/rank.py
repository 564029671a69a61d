"""Process of one rank, started by torchrun as `python -m platform.jobs.rank FOLDER [arguments of the launcher]`.

Rank 0 is the driver of the run: it writes its process id and its exit status to files in FOLDER. torchrun itself ends
with 1 for any other status than 0, and passes on only signals that kill.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from platform.boundary.local_files import replace_text

PID, STATUS = "driver.pid", "driver.status"


def main() -> None:
    """Run the launcher as a process of torchrun; rank 0 leaves its process id and exit status in files for its pod."""
    folder = Path(sys.argv.pop(1))
    driver = os.environ.get("RANK") == "0"
    if driver:
        replace_text(folder / PID, str(os.getpid()))
    try:
        runpy.run_module("platform.launch", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if driver:
            status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            replace_text(folder / STATUS, str(status))
        raise


if __name__ == "__main__":
    main()
