"""The list of mutants cannot rot: its lines are in `src`, and the tests it names are there."""

from __future__ import annotations

import ast
from collections import Counter

from run_mutants import ROOT, read_mutants

MUTANTS = read_mutants()


def test_every_line_is_in_src_once() -> None:
    lost = {mutant.name: mutant.found for mutant in MUTANTS if mutant.found != 1}
    assert lost == {}


def test_every_mutant_is_a_program() -> None:
    for mutant in MUTANTS:
        assert mutant.old != mutant.new
        source = (ROOT / "src" / "brimful" / mutant.file).read_text("utf-8")
        ast.parse(source.replace(mutant.old, mutant.new), mutant.name)


def test_every_test_that_is_named_exists() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            text = (ROOT / "tests" / file).read_text("utf-8")
            assert f"def {function.partition('[')[0]}(" in text, f"{mutant.name}: {test}"
            assert file.startswith("gpu/") == mutant.gpu, mutant.name


def test_there_are_enough_of_them_with_names_of_their_own() -> None:
    assert [name for name, times in Counter(mutant.name for mutant in MUTANTS).items() if times > 1] == []
    assert sum(not mutant.gpu for mutant in MUTANTS) >= 60
