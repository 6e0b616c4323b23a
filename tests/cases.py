"""The situations of docs/cases.md and the test behind each: `python -m tests.cases` lists them and fails where one is missing.

A test stands for a case by `@pytest.mark.case(number)`.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[1] / "docs" / "cases.md"


class Collector:
    """Collects the ids of the tests that carry a case number."""

    def __init__(self) -> None:
        self.tests: dict[int, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("case"):
                for number in mark.args:
                    self.tests[number].append(item.nodeid)


def main() -> int:
    cases = {
        int(number): text.strip() for number, text in re.findall(r"^\| (\d+) \| ([^|]+)\|", TABLE.read_text(), re.M)
    }
    if not cases:
        print(f"no cases found in {TABLE.name}")
        return 1
    collector = Collector()
    if pytest.main(["--collect-only", "-o", "addopts=", "-p", "no:terminal"], plugins=[collector]) != 0:
        print("the tests cannot be collected")
        return 1
    missing = []
    for number, text in cases.items():
        names = sorted({name.split("[")[0] for name in collector.tests[number]})
        if not names:
            missing.append(number)
            names = ["NO TEST"]
        print(f"{number:>3}  {text}")
        for name in names:
            print(f"       {name}")
    unknown = sorted(set(collector.tests) - set(cases))
    if unknown:
        print(f"marked but not in {TABLE.name}: {unknown}")
    if missing:
        print(f"no test behind {missing}")
    return 1 if missing or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
