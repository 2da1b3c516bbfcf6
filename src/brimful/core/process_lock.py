"""The one lock of what belongs to the whole process: torch's settings and default generators, Triton's hook.

One for all of them: two locks, taken in different orders by two threads, would wait for one another for ever.
"""

from __future__ import annotations

import threading

PROCESS_LOCK = threading.RLock()
