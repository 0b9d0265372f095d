"""What the environment may say."""

from __future__ import annotations

import sys

import pytest

from retire import cli
from retire.core.errors import SeamError
from retire.core.quantum import Policy
from retire.settings import Settings, size_bytes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("512MiB", 512 << 20),
        ("2 GiB", 2 << 30),
        (" 1KiB ", 1024),
        ("3TiB", 3 << 40),
    ],
)
def test_sizes_are_bytes_or_binary_units(monkeypatch, text: str, found: int) -> None:
    assert size_bytes(text) == found
    monkeypatch.setenv("RETIRE_DRAM_BYTES", text)
    assert Settings.from_env().dram_bytes == found


@pytest.mark.parametrize("text", ["", "-1", "1.5GiB", "1GB", "GiB", "1e9", "12 MiB more", "١MiB"])
def test_what_is_no_size_is_refused_by_the_name_of_its_variable(monkeypatch, capsys, text: str) -> None:
    monkeypatch.setenv("RETIRE_DRAM_BYTES", text)
    with pytest.raises(SeamError, match="RETIRE_DRAM_BYTES") as caught:
        Settings.from_env()
    assert "\n" not in str(caught.value)
    with pytest.raises(SystemExit):
        cli.main(["serve", "org/m", f"--retire-dram-bytes={text}"])
    assert "--retire-dram-bytes" in capsys.readouterr().err


def test_nothing_said_is_a_gibibyte(monkeypatch) -> None:
    monkeypatch.delenv("RETIRE_DRAM_BYTES", raising=False)
    assert Settings.from_env().dram_bytes == 1 << 30


@pytest.mark.parametrize("policy", list(Policy))
def test_a_policy_goes_from_the_flag_to_the_variable_to_every_process(monkeypatch, policy: Policy) -> None:
    for variable in ("RETIRE_POLICY", "VLLM_PLUGINS"):
        monkeypatch.setenv(variable, "x")  # restored afterwards, whatever serve sets
    monkeypatch.setattr(cli, "_on_cpu", lambda: True)
    monkeypatch.setattr("os.execv", lambda *_: sys.exit())
    with pytest.raises(SystemExit):
        cli.main(["serve", "org/m", "--retire-policy", policy.value])
    assert Settings.from_env().policy is policy


def test_nothing_said_is_selective(monkeypatch) -> None:
    monkeypatch.delenv("RETIRE_POLICY", raising=False)
    assert Settings.from_env().policy is Policy.SELECTIVE


@pytest.mark.parametrize("name", ["", "Rate", "rate-only", "rate\n", "none"])
def test_a_policy_that_nobody_knows_is_refused_in_a_line_that_names_those_there_are(monkeypatch, capsys, name) -> None:
    monkeypatch.setenv("RETIRE_POLICY", name)
    with pytest.raises(SeamError, match=r"RETIRE_POLICY: .*selective, always, rate") as caught:
        Settings.from_env()
    assert "\n" not in str(caught.value)
    with pytest.raises(SystemExit):
        cli.main(["serve", "org/m", f"--retire-policy={name}"])
    assert "--retire-policy" in capsys.readouterr().err


def test_every_step_is_armed_by_the_policy_alone(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RETIRE_ARM_MS", "0")
    with pytest.raises(SeamError, match="RETIRE_POLICY=always"):
        Settings.from_env()
    with pytest.raises(SystemExit):
        cli.main(["serve", "org/m", "--retire-arm-ms", "0"])
    assert "--retire-arm-ms" in capsys.readouterr().err
