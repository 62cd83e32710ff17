"""`hisparse serve` and one long prompt over HTTP: time to the first token, milliseconds a token, the server's metrics.

    python benchmarks/serve_long.py --shape glm4-9b-1m --context 1048576 --out FILE -- --num-gpu-blocks-override 4300
    python benchmarks/serve_long.py --model DIRECTORY --context 8000

`--shape` serves random weights of a named shape with the default model's tokenizer: the text means nothing, its log
probabilities have to be finite. What follows `--` is handed to `hisparse serve`. A row::

    {"shape", "context", "first_token_s", "ms_per_token", "start_s", "command", "metrics"}
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_vllm import INTERMEDIATE, shape_directory

from hisparse.models.load import default_directory

START = 600
"""Seconds that a server may take to start."""
TOKENS = 33
VOCABULARY = 49152
"""Of the default model's tokenizer."""


def model_directory(shape: str, context: int) -> str:
    """A configuration of a named shape, beside the tokenizer of the default model."""
    folder = Path(shape_directory(shape, context))
    for file in Path(default_directory()).iterdir():
        if "token" in file.name:
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    return str(folder)


def wait(process: subprocess.Popen[bytes], url: str, log: Path) -> float:
    """Seconds until the server says that it is well. Raises SystemExit where it ends before."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < START and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
            return time.perf_counter() - begin
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")


def ask(url: str, model: str, prompt: list[int]) -> dict[str, float]:
    """Seconds to the first token and milliseconds a token after it, of a stream; all log probabilities are finite."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=3600, max_retries=0)
    begin, times, chances = time.perf_counter(), [], []
    options: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": TOKENS,
        "logprobs": 1,
        "extra_body": {"ignore_eos": True},
    }
    for piece in client.completions.create(model=model, prompt=prompt, stream=True, **options):
        for choice in piece.choices:
            if choice.logprobs is not None and choice.logprobs.token_logprobs:
                times.append(time.perf_counter() - begin)
                chances += choice.logprobs.token_logprobs
    if len(chances) != TOKENS or not all(chance is not None and math.isfinite(chance) for chance in chances):
        raise SystemExit(f"no speed is reported: {len(chances)} of {TOKENS} tokens, log probabilities {chances}")
    gaps = [after - before for before, after in pairwise(times)]
    return {"first_token_s": round(times[0], 3), "ms_per_token": round(statistics.median(gaps) * 1e3, 3)}


def metrics(url: str) -> dict[str, float]:
    """HiSparse's, by name."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("hisparse:"))
    return {name.split("{")[0]: float(value) for name, value in lines if "_created" not in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="directory or hub id")
    source.add_argument("--shape", choices=INTERMEDIATE)
    parser.add_argument("--context", type=int, default=4096, help="tokens of the prompt")
    parser.add_argument("--out", type=Path)
    parser.add_argument("serve", nargs="*", metavar="-- OPTION", help="of `hisparse serve`")
    arguments = parser.parse_args()
    if arguments.out is not None and not arguments.out.absolute().parent.is_dir():
        parser.error(f"--out {arguments.out}: no such folder; give a file in one that exists")
    if arguments.context < 1:
        parser.error(f"--context {arguments.context}: a prompt has one token at least")

    longest = arguments.context + TOKENS
    model = model_directory(arguments.shape, longest) if arguments.shape else arguments.model
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", model, "--max-model-len", str(longest), "--max-num-seqs", "1", "--port", str(port)]
    words += ["--served-model-name", "measured", *(["--load-format", "dummy"] if arguments.shape else [])]
    words += arguments.serve
    log, url = Path(tempfile.mkdtemp()) / "server.log", f"http://127.0.0.1:{port}"
    # Told to end, it ends the server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"ended before the answer came:\n{log.read_text()[-2000:]}"))
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hisparse", *words], stdout=file, stderr=file, env=environment
        )
    try:
        started = wait(process, url, log)
        print(f"the server started in {started:.0f} s", file=sys.stderr, flush=True)
        draw = random.Random(0)
        ask(url, "measured", [draw.randrange(100, 30000) for _ in range(64)])  # kernels compiled at their first use
        found = ask(url, "measured", [draw.randrange(100, 30000) for _ in range(arguments.context)])
        time.sleep(1.5)
        ask(url, "measured", [draw.randrange(100, 30000) for _ in range(64)])  # counters are read once a second
        row = {"shape": arguments.shape or model, "context": arguments.context, **found, "start_s": round(started, 1)}
        row.update(command=words[2:], metrics=metrics(url))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
    print(json.dumps(row), flush=True)
    if arguments.out is not None:
        import torch

        from hisparse.evaluate.environment import environment as machine

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        arguments.out.write_text(json.dumps({**machine(device), "rows": [row]}, indent=1) + "\n")
    if process.returncode:
        raise SystemExit(f"the server ended with status {process.returncode}; see {log}")


if __name__ == "__main__":
    main()
