"""`hisparse serve` and its OpenAI API, by the official client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse.evaluate.needles import build_contexts, prompt_parts
from hisparse.models.load import default_directory

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
START = 240  # seconds that a server may take to start on a busy machine


class Server:
    """A server in a process group of its own, and a client of it."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        options = ["--max-model-len", "2048", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16"]
        options += ["--kv-cache-memory-bytes", str(48 << 20), "--max-num-batched-tokens", "512"]
        options += ["--port", str(self.port), "--shutdown-timeout", "10"]
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("hisparse")), "serve", "default", *options],
                stdout=file,
                stderr=file,
                env={name: value for name, value in environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"},
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=300, max_retries=0)

    def wait(self) -> None:
        for _ in range(START):
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return
            except OSError:
                time.sleep(1)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def metrics(self) -> dict[str, float]:
        """HiSparse's metrics and the number of preemptions, by name."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        found = {}
        for line in text.splitlines():
            if line.startswith(("hisparse:", "vllm:num_preemptions_total", "vllm:kv_cache_usage_perc")):
                name, value = line.rsplit(" ", 1)
                found[name.split("{")[0]] = float(value)
        return found

    def group(self) -> list[int]:
        """Processes of the server that are alive."""
        alive = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                alive.append(int(path.parent.name))
        return alive

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "log")
    try:
        server.wait()
        yield server
    finally:
        server.end()


def test_chat_and_streaming(server: Server) -> None:
    chat = server.client.chat.completions
    whole = chat.create(model="default", messages=QUESTION, temperature=0, max_tokens=20)
    assert "Paris" in whole.choices[0].message.content
    pieces = chat.create(model="default", messages=QUESTION, temperature=0, max_tokens=20, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content


def test_stop_samples_and_log_probabilities(server: Server) -> None:
    create = server.client.completions.create
    stopped = create(
        model="default", prompt="Count: one, two, three, four,", max_tokens=30, temperature=0, stop=["seven"]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert "six" in stopped.choices[0].text
    assert "seven" not in stopped.choices[0].text
    two = create(model="default", prompt="The sky is", max_tokens=5, n=2, temperature=0.9, logprobs=2)
    assert len(two.choices) == 2
    assert all(len(choice.logprobs.token_logprobs) == 5 for choice in two.choices)
    assert all(value <= 0 for value in two.choices[0].logprobs.token_logprobs)


@pytest.mark.parametrize(
    ("wrong", "status"),
    [({"max_tokens": -1}, 400), ({"temperature": -3}, 400), ({"model": "nobody"}, 404), ({"prompt": [5] * 3000}, 400)],
    ids=lambda value: str(value)[:30],
)
def test_bad_requests_are_refused(server: Server, wrong: dict[str, Any], status: int) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        server.client.completions.create(**{"model": "default", "prompt": "x", "max_tokens": 4, **wrong})
    assert refused.value.status_code == status


def test_many_clients_get_answers_about_their_own_documents(server: Server, prose: str) -> None:
    """More requests than the pool holds at once. Nobody is told what stands in another's document.

    HISPARSE_SOAK = seconds makes 32 clients ask again and again for so long, each about documents of its own.
    """
    from transformers import AutoTokenizer

    soak = float(os.environ.get("HISPARSE_SOAK", "0"))
    clients, each = (32, 4) if soak else (16, 1)
    tokenizer = AutoTokenizer.from_pretrained(default_directory())
    contexts = build_contexts(tokenizer, prose, "single", 700, clients * each)
    values = [context.needles[0].value for context in contexts]
    answers: list[tuple[int, str]] = []
    end = time.monotonic() + soak

    def ask(client: int) -> None:
        turn = 0
        while turn == 0 or time.monotonic() < end:
            number = client * each + turn % each
            document, question = prompt_parts(tokenizer, contexts[number].document, contexts[number].needles[0].key)
            prompt = document + question
            reply = server.client.completions.create(model="default", prompt=prompt, temperature=0, max_tokens=8)
            answers.append((number, reply.choices[0].text))
            turn += 1

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({number // each for number, _ in answers}) == clients
    own = sum(values[number] in answer for number, answer in answers)
    foreign = [(x, y) for x, answer in answers for y in range(len(values)) if y != x and values[y] in answer]
    found = server.metrics()
    print(f"{own} of {len(answers)} answers right, {found['vllm:num_preemptions_total']:.0f} preemptions")
    assert own >= 0.75 * len(answers), answers
    assert not foreign
    assert found["vllm:kv_cache_usage_perc"] == 0  # every block is free again


def test_metrics_tell_what_happened(server: Server) -> None:
    server.client.completions.create(model="default", prompt="Once upon a time, " * 200, max_tokens=8)
    time.sleep(1.5)
    server.client.completions.create(model="default", prompt="The end", max_tokens=8)
    found = server.metrics()
    assert found["hisparse:packed_tokens_total"] >= 512
    assert found["hisparse:device_bytes"] > 40 << 20
    assert found["hisparse:host_bytes"] > found["hisparse:device_bytes"]
    assert 0 < found["hisparse:quantisation_error"] < 0.1
    assert found["hisparse:recalled_rows_total"] > 0
    assert found["hisparse:recalled_bytes_total"] > found["hisparse:recalled_rows_total"]
    assert 0 < found["hisparse:anchor_hit_rate"] < 1
    assert found["hisparse:hot_hits_total"] == found["hisparse:hot_misses_total"] == 0  # there are no buffers on a CPU


def test_a_server_told_to_end_under_load_ends(server: Server) -> None:
    """The last test of the module."""

    def ask() -> None:
        with contextlib.suppress(openai.OpenAIError):
            server.client.completions.create(model="default", prompt="Tell me more. " * 100, max_tokens=1000)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(5)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for _ in range(20):
        if not server.group():
            break
        time.sleep(1)
    assert server.group() == []
