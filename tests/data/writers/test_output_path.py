"""Names of outputs: what they ask for, and those that are refused before anything is done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brimful.core.errors import OptionError
from brimful.data.writers.output_path import check_output, parse_output


@pytest.mark.parametrize(
    ("name", "single", "suffix"),
    [("a.csv", True, ".csv"), ("a.b.TSV.gz", True, ".tsv"), ("a", False, ".parquet"), ("there.v2", False, ".parquet")],
)
def test_what_a_name_asks_for(name: str, single: bool, suffix: str, tmp_path: Path) -> None:
    (tmp_path / "there.v2").mkdir()
    place = parse_output(tmp_path / name)
    assert (place.single, place.form.suffix) == (single, suffix)
    check_output(tmp_path / name, "-")


@pytest.mark.parametrize(
    ("output", "data", "said"),
    [
        ("a.xlsx", "in.csv", r"no form of file is known by the suffix '\.xlsx'"),
        ("a.parquet.gz", "in.csv", r"suffix '\.gz'"),
        ("in.csv", "in.csv", "is the file that is read"),
        ("link.csv", "in.csv", "is the file that is read"),
        ("in.csv/a.csv", "-", r"in\.csv is a file"),
        ("folder", "folder", "is the folder that is read"),
        ("folder/deep/er", "folder", "is in the folder that is read"),
        ("folder/a.csv", "folder", "is in the folder that is read"),
        ("folder", "folder/b.csv", r"holds .*b\.csv, which is read"),
        ("out.csv", "*.csv", r"matches .*out\.csv too"),
        ("out.parquet", "*.json", r"matches .*out\.parquet\.manifest\.json too"),
        ("out.csv", "./*", r"matches .*out\.csv too"),
        ("deep/out", "**/*.parquet", r"matches .*part-00000\.parquet too"),
        ("folder/out", "*/*/*.parquet", r"matches .*part-00000\.parquet too"),
        ("x" * 250 + ".csv", "in.csv", "name is too long"),
    ],
)
def test_names_that_are_refused(
    output: str, data: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("in.csv", "folder/b.csv"):
        Path(name).write_text("text\ngood\n", "utf-8")
    Path("link.csv").symlink_to("in.csv")
    with pytest.raises(OptionError, match=said) as caught:
        check_output(Path(output), data)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("output", "data"),
    [("out.csv", "in*.csv"), ("out", "folder"), ("folder2", "folder"), ("out.csv", "-"), ("out.csv", "folder/*.csv")],
)
def test_names_that_are_not(output: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    check_output(Path(output), data, [Path("folder/b.csv")])


def test_a_file_that_a_name_of_the_hub_or_a_glob_stands_for(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("text\ngood\n", "utf-8")
    with pytest.raises(OptionError, match="is the file that is read"):
        check_output(tmp_path / "b.csv", f"{tmp_path}/[b].cs?", [tmp_path / "b.csv"])


@pytest.mark.skipif(os.geteuid() == 0, reason="may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OptionError, match="may not write into"):
        check_output(tmp_path / "new" / "out.csv", "-")
    tmp_path.chmod(0o700)
