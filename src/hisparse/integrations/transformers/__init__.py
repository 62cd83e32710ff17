"""HiSparse inside Hugging Face transformers.

Importing this module registers the attention name `hisparse` with transformers' own registries; nothing is patched::

    model.set_attn_implementation("hisparse")
    cache = HiSparseCache(model)
    model.generate(**inputs, past_key_values=cache)
"""

from hisparse.integrations.transformers.attention import register
from hisparse.integrations.transformers.cache import HiSparseCache

register()

__all__ = ["HiSparseCache", "register"]
