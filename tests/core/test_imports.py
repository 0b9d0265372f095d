"""The core needs the standard library and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import sys
before = set(sys.modules)
import retire.core
for name in sorted(set(sys.modules) - before):
    print(name)
"""


def test_importing_the_core_loads_neither_vllm_nor_torch_nor_any_other_package():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "retire.core.transition" in loaded
    foreign = [
        name
        for name in loaded
        if name.split(".")[0] not in sys.stdlib_module_names and name != "retire" and not name.startswith("retire.core")
    ]
    assert foreign == []


def test_the_core_asks_no_clock_no_chance_and_no_file():
    banned = ("time", "datetime", "random", "secrets", "threading", "asyncio", "os", "io", "socket", "pathlib")
    for source in (ROOT / "retire" / "core").glob("*.py"):
        imported = [
            line.split()[1] for line in source.read_text().splitlines() if line.startswith(("import ", "from "))
        ]
        assert not [name for name in imported if name in banned], source.name
