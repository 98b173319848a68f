"""The adapter for lm_eval says what is missing where lm_eval is not installed."""

import importlib.util
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_lm_eval_the_error_names_the_command() -> None:
    code = "import colibri\ntry:\n    import colibri.lm_eval\n"
    code += "except colibri.UnsupportedError as error:\n    print(error)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'colibri-moe[lm_eval]'" in found.stdout
