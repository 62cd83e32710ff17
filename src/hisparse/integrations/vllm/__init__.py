"""HiSparse inside vLLM: an attention backend and the KV memory behind it.

Installed, it is found by vLLM's own entry points; nothing is patched::

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"hisparse": "hi-sparse-config.json"}'

A vLLM block stands for a fixed number of consecutive tokens and has a fixed size: the most important tokens packed, the
sketches of the others (`layout`, `memory`). The others' packed rows lie in a host pool under the same block number. The
tokens that are still dense live in a ring of blocks of the same pool, one ring a request (`spec`). Scheduler, block
tables, prefix caching and preemption are vLLM's and see a pool that holds more tokens.

Importing this package imports nothing of vLLM; `layout`, `step` and `memory` work without it.
"""
