"""Lets the live comparison import the modules of tests/ beside it, and the tools that make fixtures."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "tools")]
