"""The README's tables of families, mechanisms and types are those that tools/model_table.py writes.

Owns: that equality, and that every family and every field is in them. Refuses: what the rows say.
"""

from colibri.config import config_schema
from colibri.convert.registry import known
from test_tools import ROOT, tool


def test_the_readme_has_the_tables_of_the_tree() -> None:
    found = tool("model_table").tables()
    assert found in (ROOT / "README.md").read_text("utf-8"), "run python tools/model_table.py"
    assert all(f"`{model_type}`" in found for model_type in known())
    assert all(f"| `{one['name']}` |" in found for one in config_schema() if "default" in one)
