"""The names of the package itself."""

from __future__ import annotations

import pytest

import hisparse


@pytest.mark.parametrize("name", hisparse.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(hisparse, name) is not None
    assert name in dir(hisparse)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        hisparse.nonsense  # noqa: B018
