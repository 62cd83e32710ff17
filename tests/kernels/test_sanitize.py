"""What the script around NVIDIA's sanitizers takes for clean."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
import sanitize

RACE = """finished
========= Error: Race reported between Read access at {}+0x300
=========     and Write access at {}+0x68c0 [24 hazards]
========= RACECHECK SUMMARY: {} hazard{} displayed (1 error, 0 warnings)
"""
FUSED = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"


@pytest.mark.parametrize(
    ("tool", "status", "output", "good"),
    [
        ("memcheck", 0, "finished\n========= ERROR SUMMARY: 0 errors\n", True),
        ("memcheck", 0, "1 skipped\n========= ERROR SUMMARY: 0 errors\n", False),  # nothing was run
        ("memcheck", 9, "finished\n========= ERROR SUMMARY: 2 errors\n", False),
        ("memcheck", 1, "wrong result\n========= ERROR SUMMARY: 0 errors\n", False),
        ("racecheck", 0, "finished\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n", True),
        ("racecheck", 0, "finished\n", False),  # the sanitizer has said nothing
        ("racecheck", 9, RACE.format(FUSED, FUSED, 1, ""), True),
        ("racecheck", 9, "1 failed\n" + RACE.format(FUSED, FUSED, 1, ""), False),
        ("racecheck", 9, RACE.format(FUSED, FUSED, 2, "s"), False),  # one that is not named
        ("racecheck", 9, RACE.format("scan_and_choose", FUSED, 1, ""), False),
        ("racecheck", 9, RACE.format(FUSED, "scan_and_choose", 1, ""), False),
    ],
)
def test_verdict(tool: str, status: int, output: str, good: bool) -> None:
    assert sanitize.verdict(tool, status, output)[0] is good


def test_cases_run_without_a_sanitizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.run_case("selection") == 0
    assert "finished" in capsys.readouterr().out
