"""What each rule accepts in timm's models, and the kept table of it."""

import json
from pathlib import Path

import pytest

import isomorph as iso
from command_line import isomorph, refusal
from isomorph.lab.evaluation.coverage import cover_models

TABLE = json.loads((Path(__file__).parents[1] / "benchmarks/results/coverage.json").read_text())
SAMPLE = list(TABLE["sample"])


@pytest.fixture(scope="module")
def rows():
    rules = {name: kind() for name, kind in iso.surgery.RULES.items()}
    return {row["model"]: row for row in cover_models(SAMPLE, rules)}


def test_the_kept_table_is_what_the_rules_accept(rows):
    for name, row in rows.items():
        kept = TABLE["sample"][name]
        for rule, found in row["rules"].items():
            assert found[:2] == kept["rules"][rule][:2], (
                f"{name}, {rule}: run benchmarks/timm_coverage.py again"
            )


def test_the_command():
    text = isomorph("coverage", "xcit_nano_12_p16_224").stdout
    assert "2 of 14" in text
    assert "XCA attends between channels" in text
    assert "matches no" in refusal(isomorph("coverage", "nosuch"))
