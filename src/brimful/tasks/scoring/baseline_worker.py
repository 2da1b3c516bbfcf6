"""A process that fits one linear baseline: its task in at standard input, the baseline out at standard output.

It imports scikit-learn, but neither torch nor the user's main module. It ends when it has answered, a few seconds after
its input did: so it does not outlive the process that started it by more, however that one ended.
"""

from __future__ import annotations

import os
import pickle
import sys

#: What a process is started with, after its interpreter; the folders that modules are found in follow.
COMMAND = (
    "-c",
    "import sys; sys.path[:] = sys.argv[1:]; from brimful.tasks.scoring.baseline_worker import serve; serve()",
)
#: It is one thread beside a training.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def serve() -> None:
    """Read a `LinearTask`, and answer with what its `fit` returns."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get into the answer
    import sklearn.feature_extraction.text  # while the task is on its way
    import sklearn.linear_model  # noqa: F401

    try:
        pickle.dump(pickle.load(sys.stdin.buffer).fit(), answers, protocol=5)
        answers.flush()
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):  # nobody asks, or waits, any more
        os._exit(1)
