"""`docs/faults.md` names every known fault once, and only tests that exist."""

import ast
import functools
import pathlib
import re

TESTS = pathlib.Path(__file__).parent
LINES = (TESTS.parent / "docs" / "faults.md").read_text().splitlines()
COUNTS = {"A": 10, "B": 9, "C": 10, "D": 11, "E": 5, "G": 4}


def test_every_entry_has_one_line():
    found = [match[1] for line in LINES if (match := re.match(r"- ([A-G]\d+), ", line))]
    assert found == [f"{group}{i}" for group, count in COUNTS.items() for i in range(1, count + 1)]


@functools.cache
def functions(file: str) -> set[str]:
    return {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists():
    for line in filter(lambda line: line.startswith("- "), LINES):
        named = re.findall(r"`(\w+\.py)::(\w+)`", line)
        assert named or "not built" in line, line
        for file, name in named:
            assert name in functions(file), f"{file}::{name}"
