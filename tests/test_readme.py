"""The README's Python runs as it stands, one block after the other, and shows what it says."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_the_examples_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    tiered, resident, compare = names["tiered"], names["resident"], names["compare"]
    assert tiered.reports[0].pages_lost > 0 and 0 < tiered.hit_rate < 1 and compare(tiered, resident).equal
    assert names["by_number"] and (tmp_path / "saved").is_dir()
    assert int(names["output"].rows[0].sum()) > 8, "no draft was kept"
