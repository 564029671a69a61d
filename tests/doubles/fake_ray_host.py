"""Host of orders that plays Ray in the process beside the driver (`platform.cluster.crew.ray_process`)."""

import os
import sys
import time


class FakeHost:
    """Answers, hangs as a call of Ray's may, or ends its process as Ray's C++ code does."""

    def __init__(self, send):
        self.send = send

    def add(self, one, other):
        return one + other if isinstance(other, int) else None

    def process(self):
        return os.getpid()

    def hang(self):
        time.sleep(600)

    def abort(self, words):
        sys.stderr.write(words)
        sys.stderr.flush()
        os.abort()

    def raise_error(self, kind, *args):
        raise kind(*args)

    def end(self):
        pass
