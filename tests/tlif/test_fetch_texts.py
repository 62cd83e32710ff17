"""The text fetcher: parsers, checksums, and what it says where a client is missing."""

from __future__ import annotations

import importlib.util
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def fetcher() -> Any:
    path = Path(__file__).parents[2] / "scripts" / "fetch_texts.py"
    spec = importlib.util.spec_from_file_location("fetch_texts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch_texts"] = module
    spec.loader.exec_module(module)
    return module


def serialised(lines: list[str | None]) -> bytes:
    """An R character vector in XDR, written independently of the reader; None is NA."""
    head = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500) + struct.pack(">i", 5) + b"UTF-8"
    body = struct.pack(">ii", 16, len(lines))
    for line in lines:
        data = (line or "").encode()
        body += struct.pack(">ii", 0x00040009, -1 if line is None else len(data)) + data
    return head + body


def test_r_strings_are_read(fetcher: Any, tmp_path: Path) -> None:
    lines = ["EMMA", "", None, "By Jane Austen — ünïcode"]
    assert fetcher._strings(serialised(lines)) == ["EMMA", "", "", "By Jane Austen — ünïcode"]
    folder = tmp_path / "usr/lib/R/site-library/janeaustenr/data"
    folder.mkdir(parents=True)
    blocks = [serialised(lines), serialised(["", "Pride and Prejudice", "Chapter 1"])]
    (folder / "Rdata.rdb").write_bytes(b"".join(struct.pack(">I", len(b)) + zlib.compress(b) for b in blocks))
    assert dict(fetcher._austen(tmp_path)) == {
        "austen-emma.txt": "EMMA\n\n\nBy Jane Austen — ünïcode",
        "austen-pride-and-prejudice.txt": "\nPride and Prejudice\nChapter 1",
    }


def test_html_becomes_plain_text(fetcher: Any) -> None:
    parser = fetcher._PlainText()
    parser.feed("<head><title>no</title></head><p>One &amp; two</p><script>no</script><ul><li>three</ul>")
    assert fetcher._tidy("".join(parser.parts)) == "One & two\n\nthree\n"


def test_a_wrong_checksum_is_refused(fetcher: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / fetcher.SOURCES["jargon"].file).write_bytes(b"not the package")
    assert fetcher.main(["jargon", "--from", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "SHA-256" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_missing_package_is_refused(fetcher: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fetcher.main(["austen", "--from", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_machine_without_apt_is_told_what_to_do(
    fetcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fetcher.main(["austen", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "apt-get is not on this machine" in message
    assert "--from" in message


def test_an_unknown_name_is_refused(fetcher: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fetcher.main(["bible", "--out", str(tmp_path)])
    assert "'bible'" in capsys.readouterr().err
