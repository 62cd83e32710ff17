"""Without the progress bars that other libraries draw while they load a model: ours says in a line what takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def _undrawn(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return make(*args, **{**kwargs, "disable": True})


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bar of transformers or of the hub's client is drawn within; what was set before holds again after.

    Not for several threads at once: the settings are the process's.
    """
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    # Where the environment says whether the hub's client draws bars, it cannot be told otherwise.
    hub = HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
    reader_bar = gguf_reader.tqdm
    hook = logging.set_tqdm_hook(_undrawn)
    try:
        gguf_reader.tqdm = logging.tqdm  # the GGUF reader draws its own, which heeds no setting
        if hub:
            disable_progress_bars()
        yield
    finally:
        logging.set_tqdm_hook(hook)
        gguf_reader.tqdm = reader_bar
        if hub:
            enable_progress_bars()
