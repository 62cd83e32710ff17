"""How vLLM's command line is started where its distribution has another name. Needs no vLLM."""

from __future__ import annotations

import importlib.metadata

import pytest

from hisparse.integrations.vllm import launch


def test_a_failure_of_the_server_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not behind that of looking for a distribution."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    def serve() -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(launch, "_serve_alone", serve)
    with pytest.raises(RuntimeError, match="no memory") as failure:
        launch.main()
    assert failure.value.__context__ is None
