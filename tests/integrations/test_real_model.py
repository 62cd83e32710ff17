"""The default model on English text: the packed cache with recall predicts what the dense cache predicts."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hisparse.cli.main import app
from hisparse.config import HiSparseConfig
from hisparse.integrations.transformers import HiSparseCache

# Written for this test; facts of its own, so that the far past matters to what comes next.
TEXT = """\
The ferry to Sandholm leaves at seven, and Ingrid Vale has never once been early for it. She keeps the lamp room of
the old lighthouse, forty-one steps above the kitchen, and she counts them aloud when the wind is from the north. In
the winter of the long ice she wrote every ship into a green ledger: the Marrow, the Two Sisters, the Halcyon, and a
grey steamer whose name had been painted over. The steamer came back three times. On its third visit a boy rowed
ashore with a parcel wrapped in sailcloth and asked for the keeper by name.
"You are Ingrid Vale," he said, and it was not a question. The parcel held a brass key, a map of the harbour drawn
before the mole was built, and a letter in her father's hand. Her father had been dead for eleven years. The letter
said that the key would open the third locker in the cellar of the customs house, that the number painted on its
door was 4187, and that she was to trust nobody who wore a blue scarf. She read it twice, folded it along its old
creases, and put it under the ledger.
The customs house stood at the other end of the harbour, behind the ropewalk, where the cats slept. Its cellar
flooded at spring tides, and the clerk, a patient man called Osric Penhale, pumped it dry on Mondays. Ingrid chose a
Monday. Osric was wearing a brown coat, a brown hat and, since the day was cold, a scarf that his sister had
knitted. The scarf was blue. She talked with him about the price of herring and the new bell, bought a licence for a
dinghy that she did not own, and went home with the brass key still in her pocket.
In the spring before, a surveyor from the capital had measured the rock and declared that the light stood nine feet
lower than the charts allowed. He drank her tea, corrected her clocks, and left behind a copper plumb line, which
she used for drying herrings. She had liked him, as one likes weather that is passing through.
That evening the steamer lay off the point with no lights. Ingrid climbed the forty-one steps, trimmed the lamp, and
wrote its arrival into the green ledger. Beside the entry she drew a small key. Then she turned to the first page,
where the names of the keepers stood in order, and found that the ink of her father's name was fresh. She thought of
the boy, of the number on the locker, and of the colour of a scarf that anybody's sister might have knitted. When
the clock struck ten she put on her coat. The number painted on the door, she told herself once more, was"""
ANSWER = " 4187"
STEPS = 32


@pytest.fixture(scope="module")
def run(default_model: tuple[Any, Any]) -> Any:
    """The model on hisparse attention, the tokens, and the dense model's log-probabilities of the last STEPS tokens."""
    model, tokenizer = default_model
    ids = tokenizer(TEXT + ANSWER, return_tensors="pt").input_ids
    before = model.config._attn_implementation
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        dense = model(ids).logits[0, -STEPS - 1 : -1].log_softmax(-1)
    model.set_attn_implementation("hisparse")
    yield model, ids, dense
    model.set_attn_implementation(before)


def shipped_cache(model: Any, config: HiSparseConfig) -> HiSparseCache:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the default model has a TLIF and a calibration
        return HiSparseCache(model, config)


@pytest.mark.real_model
@pytest.mark.parametrize(("bits", "rows", "budget"), [(2, "host", 128), (1, "device", 256)])
def test_decoding_with_recall_follows_the_dense_cache(run: Any, bits: int, rows: str, budget: int) -> None:
    model, ids, dense = run
    length = ids.shape[1]
    assert 550 < length < 750
    selection = {"row_size": 4, "sketch_bits": bits, "rows": rows, "min_tokens": budget, "root_factor": 0.0}
    cache = shipped_cache(model, HiSparseConfig(selection=selection))
    with torch.no_grad():
        model(ids[:, : length - STEPS - 1], past_key_values=cache)
        logits = [
            model(ids[:, i : i + 1], past_key_values=cache).logits[0, -1] for i in range(length - STEPS - 1, length - 1)
        ]
    found = torch.stack(logits).log_softmax(-1)
    divergence = (dense.exp() * (dense - found)).sum(-1)
    assert float(divergence.mean()) < 0.02
    # The number stands in the far past; whatever the dense cache makes of it, the packed one makes as well.
    assert (found.argmax(-1) == dense.argmax(-1)).float().mean() > 0.9

    report, config = cache.report(), model.config
    heads, layers, dim = (
        config.num_key_value_heads,
        config.num_hidden_layers,
        config.hidden_size // config.num_attention_heads,
    )
    assert report.tokens["total"] == length - 1
    assert report.dense_bytes == (length - 1) * layers * heads * dim * 2 * 2
    assert report.gpu_bytes == sum(report.device.values())
    assert report.capacity == report.dense_bytes / report.gpu_bytes
    assert report.device["dense"] == layers * cache.geometry.slots * heads * dim * 2 * 4  # float32 model
    set_aside = report.tokens["set_aside"]
    assert set_aside > 250
    assert report.device["sketches"] >= layers * set_aside * heads * (dim * bits // 8 + 1)
    row_bytes = cache.geometry.row_format.page_bytes
    stored = report.device["rows"] if rows == "device" else report.host_bytes
    assert stored >= layers * set_aside // 4 * row_bytes
    assert report.recall["steps"] == STEPS
    assert report.recall["rows"] == layers * STEPS * budget // 4  # of about 110 rows
    assert report.recall["bytes"] == report.recall["rows"] * row_bytes
    text = cache.check_integrity()
    assert f"{length - 1} tokens = " in text
    assert f"= {report.gpu_bytes} bytes" in text


@pytest.mark.real_model
def test_a_question_prefilled_over_a_packed_past_follows_the_dense_cache(run: Any) -> None:
    model, ids, dense = run
    length = ids.shape[1]
    selection = {"min_tokens": 128, "root_factor": 0.0}
    for mode in ("full", "recall"):
        cache = shipped_cache(model, HiSparseConfig(selection=selection, prefill={"mode": mode}))
        with torch.no_grad():
            for piece in ids[:, : length - STEPS - 1].split(200, 1):
                model(piece, past_key_values=cache)
            logits = model(ids[:, length - STEPS - 1 : length - 1], past_key_values=cache).logits[0]
        found = logits.log_softmax(-1)
        assert float((dense.exp() * (dense - found)).sum(-1).mean()) < 0.02
        cache.check_integrity()


@pytest.mark.real_model
def test_nothing_packed_gives_the_very_tokens(run: Any) -> None:
    model, ids, _ = run
    exact = HiSparseConfig(evict="none", vtq={"enable_per_block_quant": False})
    new = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    prefilled = shipped_cache(model, exact)
    fork = copy.deepcopy(prefilled)
    found = model.generate(ids, past_key_values=fork, **new)
    assert torch.equal(found, model.generate(ids, past_key_values=DynamicCache(), **new))
    assert fork.get_seq_length() == ids.shape[1] + 23
    assert prefilled.get_seq_length() == 0


@pytest.mark.real_model
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("chunk", [None, 200])
def test_generate_gives_the_same_text_on_a_gpu(tmp_path: Path, chunk: int | None) -> None:
    """By the command line; pages of 16 on both, where each device has a size of its own."""
    prompt, config = tmp_path / "prompt.txt", tmp_path / "config.json"
    prompt.write_text(TEXT * 2, encoding="utf-8")
    config.write_text(json.dumps({"vtq": {"page_size": 16}, "selection": {"min_tokens": 128, "root_factor": 0.0}}))
    found = []
    for device in ("cpu", "cuda"):
        out = tmp_path / f"{device}.json"
        command = ["generate", "-f", str(prompt), "-c", str(config), "-n", "48", "--json", str(out)]
        command += ["--device", device, "--dtype", "float32", *(["--chunk", str(chunk)] if chunk else [])]
        app(args=command, prog_name="hisparse", standalone_mode=False)
        found.append(json.loads(out.read_text(encoding="utf-8")))
    assert found[1]["text"] == found[0]["text"]
    assert found[1]["recall"]["blocks"] > 0
