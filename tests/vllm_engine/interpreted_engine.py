"""interpreted_engine.py MODEL CONFIG PROMPTS NEW: an engine on a CPU, with a GPU's kernels in Triton's interpreter.

CONFIG is HiSparse's configuration, PROMPTS a list of prompts, both in JSON. Prints the tokens of each prompt in JSON,
in the last line. Prompts are read 64 tokens a step, so that most steps have chunks beside single tokens.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ.update(TRITON_INTERPRET="1", HISPARSE_BACKEND="triton")  # read by what is imported next
    import torch
    from engine_tools import MIB, SMALL, engine, generate, runtime

    from hisparse.integrations.vllm import runtime as module

    module.STATIC = ("cpu",)  # type: ignore[assignment]
    module.Runtime._captures = lambda self: False  # type: ignore[method-assign]
    torch.cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]
    model, config, prompts, new = sys.argv[1:]
    options = {"model": model, **SMALL, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with engine(json.loads(config), 64 * MIB, 64, **options) as llm:
        found = generate(llm, json.loads(prompts), int(new), detokenize=False)
        assert all(memory.batched for memory in runtime().layers)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # an engine's threads take their time
