"""Everything offline, quiet, on one thread, and with a cache folder of its own."""

from __future__ import annotations

import os
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
_cache = tempfile.TemporaryDirectory(prefix="brimful-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name

import torch  # noqa: E402  (what is imported reads the environment)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU, step by step
import transformers  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(1)  # models are tiny: two threads wait for one another, ten times as long on a busy machine
transformers.logging.set_verbosity_error()

# Equal examples in every run: what is found once is found always. `--hypothesis-profile=search` looks further.
settings.register_profile("brimful", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000)
settings.load_profile("brimful")


def pytest_unconfigure() -> None:
    _cache.cleanup()
