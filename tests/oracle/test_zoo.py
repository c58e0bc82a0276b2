"""Over the whole zoo: rows that share a batch give what each gives alone, and the table says where they can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxbcd.model import zoo
from oracle import coverage
from oracle.alone import TOLERANCE, relative_error, texts
from oracle.families import CONFIGS, FAMILIES, MISSING, load
from oracle.probes import COLUMNS, PASS, cells
from oracle.programs import Programs, run_programs

TABLE = coverage.read()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_does_what_the_table_says(name: str) -> None:
    assert cells(load(name)) == TABLE[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_reads_its_past(name: str) -> None:
    text = texts(name)[0]
    change = relative_error(text.changed(-2).logits[-1], text.logits[-1])
    assert change > 5 * TOLERANCE, "an oracle over such a model would see no mistake"


@pytest.mark.parametrize("name", ["llama", "exaone4", "gemma2", "gemma4", "qwen3_5", "falcon_h1"])
def test_short_programs_give_each_row_what_it_gives_alone(name: str) -> None:
    """One family for each kind of layout, and for each way to read keys."""
    run_programs(Programs, name, 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in FAMILIES if TABLE[name]["batch"] == PASS])
def test_any_program_gives_each_row_what_it_gives_alone(name: str) -> None:
    run_programs(Programs, name, 20)


def test_the_table_is_about_the_families_there_are() -> None:
    assert coverage.PATH.read_text(encoding="utf-8") == coverage.render({name: TABLE[name] for name in FAMILIES})


def test_most_families_batch_roll_back_and_pack() -> None:
    def passing(column: str) -> int:
        return sum(row[column] == PASS for row in TABLE.values())

    assert passing("batch") >= 50
    assert passing("rollback") >= 45
    assert passing("packs") >= 110
    assert all(row[column] for row in TABLE.values() for column in COLUMNS)


def test_every_module_of_the_zoo_with_a_model_is_a_family_or_is_missed_for_a_reason() -> None:
    modules = {path.stem for path in _modules() if "\nclass Model(" in path.read_text(encoding="utf-8")}
    covered = {zoo.module_name(config) for config in CONFIGS.values()}
    assert modules - covered == set(MISSING)


def _modules() -> list[Path]:
    return sorted(zoo.bind().glob("*.py"))
