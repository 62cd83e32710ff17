"""`tests/on_gpu.py` on a machine without a GPU: its commands exist, and what it says of them is true."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import on_gpu
from hisparse.cli.main import app

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = [(name, words) for name, part in on_gpu.PARTS.items() for words in part.commands]


@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(COMMANDS)])
def test_commands_name_files_and_options_that_exist(name: str, words: tuple[str, ...]) -> None:
    files = [word for word in words if word.startswith(("tests/", "benchmarks/"))]
    assert files or words[1] == "hisparse"
    for word in files:
        assert (ROOT / word).exists()
    if words[0] == "-m":
        if words[1] == "hisparse":
            text = CliRunner().invoke(app, [*words[2:4], "--help"], env={"COLUMNS": "200"}).output
            text = re.sub(r"\x1b\[[0-9;]*m", "", text)
        else:
            return
    else:
        text = (ROOT / words[0]).read_text()
    own = words[: words.index("--")] if "--" in words else words
    for option in own[1:]:
        if option.startswith("-") and option != "-m":
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), option


def short(*code: str, **kinds: bool) -> on_gpu.Part:
    return on_gpu.Part(tuple(("-c", line) for line in code), **kinds)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")


def run(monkeypatch: pytest.MonkeyPatch, out: Path, parts: dict[str, on_gpu.Part], *words: str) -> tuple[int, dict]:
    monkeypatch.setattr(on_gpu, "PARTS", parts)
    status = on_gpu.main(["--out", str(out), *words])
    return status, {entry["part"]: entry for entry in json.loads((out / "summary.json").read_text())}


def test_parts_have_a_gpu_each_and_what_is_timed_runs_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: None, capsys: pytest.CaptureFixture[str]
) -> None:
    say = "import os, time; print('GPU', os.environ['CUDA_VISIBLE_DEVICES'], time.time()); time.sleep(0.5)"
    say += "; print(time.time())"
    parts = {
        "clock": short(say, say, timed=True),
        "one": short(say),
        "two": short(say),
        "all": short(say, every=True),
        "more": short("1 / 0", extra=True),
    }
    status, found = run(monkeypatch, tmp_path, parts)
    assert status == 0
    assert {name: entry["status"] for name, entry in found.items()} == dict.fromkeys(
        ("clock", "one", "two", "all"), "good"
    )
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in found}
    assert {re.search(r"^GPU (\d)", logs[name], re.MULTILINE)[1] for name in ("one", "two")} == {"3", "5"}  # type: ignore[index]
    assert "GPU 3,5 " in logs["all"]
    times = {name: [float(x) for x in re.findall(r"\d{9,}\.\d+", log)] for name, log in logs.items()}
    assert min(times["clock"]) > max(times["one"] + times["two"])
    assert "good" in capsys.readouterr().out


def test_failures_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 + 1 == 3, 'sum'\n"
        "@pytest.mark.skip\ndef test_not(): pass\n"
    )
    parts = {
        "some": on_gpu.pytest_part(str(tmp_path / "test_some.py"), needs=None),
        "times": short("raise SystemExit(4)", "print('goes on')", timed=True),
        "absent": on_gpu.Part((), needs="no_such_module"),
    }
    status, found = run(monkeypatch, tmp_path / "out", parts)
    assert status == 1
    assert found["some"]["status"] == "failed"
    assert found["some"]["counts"] == {"passed": 1, "failure": 1, "skipped": 1}
    assert "test_bad" in found["some"]["failures"][0]
    assert "sum" in found["some"]["failures"][0]
    assert found["times"]["status"] == "failed"
    assert "goes on" in (tmp_path / "out" / "times.log").read_text()
    assert found["absent"]["status"] == "left out: no_such_module is not here"
    assert "test_bad" in capsys.readouterr().out
    # What an earlier run left in the folder is not taken for this one's.
    parts["some"] = short("raise SystemExit(3)")
    _, found = run(monkeypatch, tmp_path / "out", parts)
    assert found["some"]["counts"] == {}
    assert found["some"]["failures"] == ["status 3: -c raise SystemExit(3)"]


def test_what_does_not_end_in_time_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: None
) -> None:
    child = "import time\nwhile True: print('on', flush=True); time.sleep(0.1)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    begin = time.monotonic()
    monkeypatch.setattr(on_gpu, "PATIENCE", 1)
    status, found = run(monkeypatch, tmp_path, {"long": short(parent), "late": short("1")}, "--seconds", "2")
    assert time.monotonic() - begin < 30
    assert status == 1
    assert found["long"]["status"] == "not in time"
    assert found["late"]["status"] == "good"  # it had the other GPU
    size = (tmp_path / "long.log").stat().st_size
    time.sleep(0.5)
    assert (tmp_path / "long.log").stat().st_size == size


def test_a_test_that_was_interrupted_is_not_counted(tmp_path: Path) -> None:
    """pytest's report has a nameless entry of it."""
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="1"><testcase classname="a" name="test_one"/><testcase time="0.001"/>'
        "</testsuite></testsuites>"
    )
    assert on_gpu.read_report(report) == ({"passed": 1}, [])


@pytest.mark.parametrize("left", ["", "<testsuites><testcase name="])
def test_a_report_that_was_not_written_to_its_end_fails_its_part_alone(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: None
) -> None:
    parts = {"torn": short(f"open({str(tmp_path / 'torn.xml')!r}, 'w').write({left!r})"), "other": short("1")}
    status, found = run(monkeypatch, tmp_path, parts)
    assert status == 1
    assert found["torn"]["status"] == "failed"
    assert "torn.xml: the report cannot be read" in found["torn"]["failures"][0]
    assert found["other"]["status"] == "good"


@pytest.mark.parametrize(("named", "gpus"), [("0,", ["0"]), (",1", ["1"]), ("-1", []), ("2, 3", ["2", "3"])])
def test_gpus_that_are_named(named: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert on_gpu.visible() == gpus


def test_wrong_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: None
) -> None:
    for words, text in (
        (["--out", str(tmp_path), "kernel"], "part 'kernel' is not known"),
        ([], "--out FOLDER is missing"),
    ):
        with pytest.raises(SystemExit):
            on_gpu.main(words)
        assert text in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        on_gpu.main(["--out", str(tmp_path / "file"), "kernels"])
    assert "file: cannot be written to" in capsys.readouterr().err
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        on_gpu.main(["--out", str(tmp_path)])
    assert "no GPU" in capsys.readouterr().err
