"""One run of a model over a text with a HiSparse cache: what `generate`, `inspect-kv-cache` and `demo` share."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hisparse.cli.progress import phase
from hisparse.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from hisparse.config import HiSparseConfig
    from hisparse.integrations.transformers import HiSparseCache

_LONG = 1000  # tokens of a prompt that is worth a line while nothing else can be seen


def read_text(path: Path) -> str:
    """A text file's content. Raises InputError for a missing, binary (not UTF-8, or with NUL bytes) or empty file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"text file {path}: {error.strerror}; give the path of a UTF-8 text file") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text file {path}: not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}); "
            "convert it to UTF-8 text first"
        ) from None
    if "\0" in text:
        raise InputError(f"text file {path}: a binary file (NUL at offset {data.index(0)}); give a UTF-8 text file")
    if not text.strip():
        raise InputError(f"text file {path}: empty; give a text of at least one word")
    return text


@dataclass(frozen=True)
class Prompt:
    """Token ids: `document` [1, N] is prefilled and compressed first, `question` [1, Q] (Q may be 0) afterwards."""

    document: Tensor
    question: Tensor

    @property
    def ids(self) -> Tensor:
        """int64 [1, N + Q]"""
        import torch

        return torch.cat([self.document, self.question], dim=1)

    @property
    def length(self) -> int:
        return self.document.shape[1] + self.question.shape[1]


def build_prompt(tokenizer: Any, document: str, question: str | None = None, device: Any = None) -> Prompt:
    """Tokenise a document and an optional question about it.

    With a question and a chat template, both are one user turn, cut after the document, so that the document's part
    does not depend on the question. Without a template the question follows as plain text. Raises InputError where no
    token results.
    """
    import torch

    def encode(text: str, special: bool) -> Tensor:
        ids = tokenizer(text, add_special_tokens=special).input_ids
        return torch.tensor([ids], dtype=torch.int64, device=device)

    if not document.strip():
        raise InputError("the prompt is empty; give a text of at least one word")
    if question is None:
        prompt = Prompt(encode(document, True), torch.empty((1, 0), dtype=torch.int64, device=device))
    elif not question.strip():
        raise InputError("the question is empty; leave --question out to continue the text")
    else:
        parts = _chat_parts(tokenizer, document.strip(), question.strip())
        if parts is not None:
            prompt = Prompt(encode(parts[0], False), encode(parts[1], False))
        else:
            plain = f"\n\nQuestion: {question.strip()}\nAnswer:"
            prompt = Prompt(encode(document.rstrip(), True), encode(plain, False))
    if not prompt.document.shape[1]:
        raise InputError("the prompt holds no token that this model's tokenizer knows; give another text")
    return prompt


def _chat_parts(tokenizer: Any, document: str, question: str) -> tuple[str, str] | None:
    """The rendered chat up to the document's end, and the rest; None without a template that shows the document."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = rendered.find(document)
    if start < 0:
        return None
    return rendered[: start + len(document)], rendered[start + len(document) :]


def check_window(model: Any, prompt_tokens: int, new_tokens: int) -> None:
    """Raise InputError where prompt and new tokens exceed the positions the model was made for."""
    from hisparse.models import context_window

    window = context_window(model)
    if window is None:
        return
    if prompt_tokens > window:
        raise InputError(
            f"the prompt has {prompt_tokens} tokens, but the model's window is {window}; shorten the text or choose a "
            "model with a longer window"
        )
    if prompt_tokens + new_tokens > window:
        raise InputError(
            f"the prompt has {prompt_tokens} tokens and {new_tokens} new ones are asked for, but the model's window is "
            f"{window}; ask for at most {window - prompt_tokens} new tokens or shorten the text"
        )


@dataclass
class Result:
    """What a run produced. `logits` float32 [n, vocabulary]: what the n new tokens were chosen from, if kept."""

    prompt: Prompt
    new_ids: list[int]
    text: str
    logits: Tensor | None
    seconds: dict[str, float]
    cache: HiSparseCache
    dense: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form; the README lists its keys."""
        report = self.cache.report()
        tokens = dict(report.tokens)
        data: dict[str, Any] = {
            "text": self.text,
            "prompt_tokens": self.prompt.length,
            "question_tokens": self.prompt.question.shape[1],
            "new_tokens": len(self.new_ids),
            "kv": {
                "dense_bytes": report.dense_bytes,
                "gpu_bytes": report.gpu_bytes,
                "host_bytes": report.host_bytes,
                "model_bytes": report.model_bytes,
                "capacity": report.capacity,
                "target": self.cache.config.budget.capacity if self.cache.config.evict != "none" else None,
                "device": dict(report.device),
            },
            "tokens": tokens,
            "blocks": report.blocks,
            "recall": {"blocks": report.recall["rows"], **{k: v for k, v in report.recall.items() if k != "rows"}},
            "seconds": self.seconds,
            **self.extra,
        }
        if self.dense is not None:
            data["dense"] = self.dense
        return data


class _Stopwatch:
    """A logits processor that changes nothing and notes when the first logits were ready: the end of prefill."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.first is None:
            synchronize(scores.device)
            self.first = time.perf_counter()
        return scores

    def seconds(self) -> dict[str, float]:
        end = time.perf_counter()
        first = end if self.first is None else self.first
        return {"prefill": first - self.start, "decode": end - first}


def synchronize(device: Any) -> None:
    """Wait for the device, so that a clock read next is true."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prefill(model: Any, ids: Tensor, cache: Any, chunk: int | None = None) -> None:
    """Run `ids` int64 [1, N] through the model into `cache`, in one piece or in chunks; forms the last logits only."""
    import torch

    done = cache.get_seq_length()
    with torch.inference_mode():
        for piece in torch.split(ids, chunk or max(ids.shape[1], 1), dim=1):
            done += piece.shape[1]
            mask = torch.ones((1, done), dtype=torch.int64, device=ids.device)
            model(input_ids=piece, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    cache: HiSparseCache,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    chunk: int | None = None,
    keep_logits: bool = False,
    streamer: Any = None,
) -> Result:
    """Prefill the document, then the question, then decode, all through ``model.generate`` and the cache."""
    import torch
    from transformers import LogitsProcessorList

    ids, watch = prompt.ids, _Stopwatch()
    # What generate() itself prefills is the question, or the last chunk of a document without one.
    ahead = prompt.document.shape[1]
    if not prompt.question.shape[1]:
        ahead = 0 if chunk is None else (ahead - 1) // chunk * chunk
    if ahead:
        prefill(model, ids[:, :ahead], cache, chunk)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            logits_processor=LogitsProcessorList([watch]),
            output_logits=keep_logits,
            return_dict_in_generate=True,
            streamer=streamer,
            **sampling(temperature),
        )
    synchronize(ids.device)
    seconds = watch.seconds()
    new_ids = out.sequences[0, prompt.length :].tolist()
    logits = torch.cat([step.float() for step in out.logits]) if keep_logits else None
    text = tokenizer.decode(new_ids, skip_special_tokens=True)
    return Result(prompt, new_ids, text, logits, seconds, cache)


def sampling(temperature: float) -> dict[str, Any]:
    """Arguments of generate(): greedy for 0, else plain sampling at this temperature, whatever the model's defaults."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}


def compare_dense(model: Any, tokenizer: Any, result: Result, max_new_tokens: int) -> dict[str, Any]:
    """The same prompt with transformers' DynamicCache and sdpa attention.

    One prefill serves two purposes. Our new tokens are forced through it: `mean_kl` is the mean over them of
    KL(dense || ours) of the next-token distribution in nats, `token_agreement` the share where the dense argmax is our
    token. Then the cache is cropped to the prompt and continued greedily: `text`. Attention is left on "hisparse".
    """
    import torch
    from transformers import DynamicCache

    assert result.logits is not None, "run generate() with keep_logits=True first"
    ids, n = result.prompt.ids, len(result.new_ids)
    forced = torch.tensor([result.new_ids], dtype=torch.int64, device=ids.device)
    model.set_attn_implementation("sdpa")
    try:
        cache = DynamicCache(config=model.config)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):  # sliding-window layers forget what a crop needs unless told
                layer.activate_past_recording()
        begin = time.perf_counter()
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            last = model(input_ids=ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits[:, -1:]
            synchronize(ids.device)
            prefilled = time.perf_counter()
            mask = torch.ones((1, ids.shape[1] + n - 1), dtype=torch.int64, device=ids.device)
            logits = last
            if n > 1:
                after = model(input_ids=forced[:, :-1], attention_mask=mask, past_key_values=cache).logits
                logits = torch.cat([last, after], dim=1)
            theirs = logits[0].float().log_softmax(-1)
            ours = result.logits.to(theirs.device).log_softmax(-1)
            kl = (theirs.exp() * (theirs - ours)).sum(-1)
            agreement = (theirs.argmax(-1) == forced[0]).float().mean()
        cache.crop(-n)  # the n - 1 forced tokens and the prompt's last one, which generate() then feeds itself
        start = time.perf_counter()
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            **sampling(0.0),
        )
        synchronize(ids.device)
        seconds = {"prefill": prefilled - begin, "decode": time.perf_counter() - start}
    finally:
        model.set_attn_implementation("hisparse")
    return {
        "text": tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True),
        "token_agreement": float(agreement),
        "mean_kl": max(float(kl.mean()), 0.0),  # rounding can take a zero below it
        "seconds": seconds,
    }


def open_model(name: str, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """A model on "hisparse" attention, and its tokenizer. Device and dtype as in `read_model`."""
    import hisparse.integrations.transformers  # noqa: F401 - registers the attention implementation

    model, tokenizer = read_model(name, device, dtype)
    model.set_attn_implementation("hisparse")
    return model, tokenizer


def read_model(name: str, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """A model and its tokenizer: by default on CUDA where there is one, in float32 on the CPU, else as it was saved.

    Raises InputError for a device that is not there and for an unknown dtype, ModelError as `load_model`.
    """
    import torch

    from hisparse.models import load_model
    from hisparse.models.bars import without_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries are told by our own error
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(where)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {where}: {reason}; use cpu, or cuda where PyTorch finds a GPU") from None
    if dtype not in (None, "auto", "float32", "bfloat16", "float16"):
        raise InputError(f"--dtype {dtype}: unknown; use float32, bfloat16, float16 or auto")
    with without_bars():
        return load_model(name, dtype or ("float32" if target.type == "cpu" else "auto"), target)


def open_config(path: Path | None) -> HiSparseConfig:
    """The configuration in a file, or the default one. Raises ConfigError."""
    from hisparse.config import HiSparseConfig

    return HiSparseConfig() if path is None else HiSparseConfig.load(path)


def open_cache(
    model: Any,
    config: HiSparseConfig,
    tlif: Path | None = None,
    calibration: Path | None = None,
    keep_plans: bool = False,
) -> HiSparseCache:
    """An empty cache for one run. Raises InputError where a named companion file does not exist."""
    from hisparse.integrations.transformers import HiSparseCache

    for option, path in (("--tlif", tlif), ("--calibration", calibration)):
        if path is not None and not path.is_file():
            raise InputError(f"{option} {path}: no such file; leave the option out to use what ships with HiSparse")
    return HiSparseCache(model, config, tlif=tlif, calibration=calibration, keep_plans=keep_plans)


def complete(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    config: HiSparseConfig,
    max_new_tokens: int,
    *,
    tlif: Path | None = None,
    calibration: Path | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    chunk: int | None = None,
    compare: bool = False,
    stream: bool = False,
    keep_plans: bool = False,
) -> Result:
    """One whole run in a cache of its own; with `stream` the text goes to stdout as it comes, progress to stderr."""
    import torch
    from transformers import TextStreamer

    cache = open_cache(model, config, tlif, calibration, keep_plans)
    if stream and prompt.length > _LONG:
        print(f"Reading {prompt.length} tokens ...", file=sys.stderr, flush=True)
    torch.manual_seed(seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    result = generate(
        model,
        tokenizer,
        prompt,
        cache,
        max_new_tokens,
        temperature=temperature,
        chunk=chunk or config.prefill.chunk,
        keep_logits=compare,
        streamer=streamer,
    )
    if compare:
        with phase("The same with the dense cache ..."):
            result.dense = compare_dense(model, tokenizer, result, max_new_tokens)
    return result
