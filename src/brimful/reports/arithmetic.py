"""The effect of a lever on the arithmetic, in words."""

from __future__ import annotations

from brimful.core.records import Arithmetic, Recipe

_MEANING: dict[Arithmetic, str] = {
    "exact": "the same result as the plain model, up to the order of sums",
    "rounding": "the same computation in lower precision",
    "training": "a different computation, which you asked for",
}


def arithmetic_legend(recipe: Recipe) -> list[str]:
    """Explain each kind of arithmetic that the recipe has, a line per kind."""
    return [f"{kind}: {_MEANING[kind]}" for kind in dict.fromkeys(lever.arithmetic for lever in recipe.levers)]
