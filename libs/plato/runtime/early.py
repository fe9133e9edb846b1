"""Imported before all else by each service's `__main__`: a container's first process may be told to end while it imports.

The kernel throws away a signal that process 1 has no handler for, so a SIGTERM in that second would be lost and the pod
would last until its grace period ends. Whoever has begun nothing may end at once; the service puts its own handler here.
"""

from __future__ import annotations

import os
import signal

if os.getpid() == 1:
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
