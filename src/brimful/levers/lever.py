"""The lever protocol: support, cost, effect on the arithmetic, and reason.

One file a lever. `apply` differs by lever, because what is applied differs: a context, an optimizer, an execution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from brimful.core.records import Arithmetic, Lever


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Answer to "does a lever work here", with the reason."""

    ok: bool
    because: str


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes that a lever keeps on the device for as long as training lasts, and for the length of one step."""

    resident_bytes: int = 0
    step_bytes: int = 0


class Technique(Protocol):
    """A lever, chosen: its value is fixed, its reason known.

    source: where the method and its figures come from.
    """

    source: str

    @property
    def arithmetic(self) -> Arithmetic:
        """`exact`, `rounding` or `training`."""
        ...

    def supports(self) -> Verdict:
        """True if it works on the device it was made for."""
        ...

    def cost(self, num_parameters: int) -> Cost:
        """Memory cost for a model with so many parameters."""
        ...

    def lever(self) -> Lever:
        """Its line in the recipe."""
        ...
