from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hisparse.blgs import draw_plan, plan_blocks, plan_fixed_blocks, synthetic_importance
from hisparse.blgs.compare import compare, tokens_fixed_blocks_need
from hisparse.cli.plan import plan_blocks_command, read_importance, score_text
from hisparse.config import BlgsConfig, HiSparseConfig
from hisparse.errors import InputError
from hisparse.identity import ModelIdentity
from hisparse.tlif import scorer_for

DEFAULT = BlgsConfig()


@pytest.mark.parametrize("length", [0, 1, 7, 1025, 40000])
def test_picture_is_written_for_any_length(length: int, tmp_path: Path) -> None:
    p = synthetic_importance(length)
    draw_plan(plan_blocks(p, 0.32, DEFAULT, 192), tmp_path / "plan.png", p)
    assert matplotlib.image.imread(tmp_path / "plan.png").shape[2] in (3, 4)


def test_picture_is_brightest_at_the_mode_and_fades(tmp_path: Path) -> None:
    p = torch.full((1024,), 0.05)
    p[512] = 0.9
    draw_plan(plan_blocks(p, 0.32, DEFAULT, 192), tmp_path / "plan.png", p)
    image = matplotlib.image.imread(tmp_path / "plan.png")[..., :3].sum(2)
    row = image[110:330, 140 : 140 + 2048].max(0)  # the only row of blocks, two pixels a token
    light = [row[2 * at + 4] for at in (514, 522, 540, 600, 900)]
    assert light == sorted(light, reverse=True)
    assert light[0] > 2 * light[2] > 0


def test_picture_refuses_other_importance_and_unwritable_paths(tmp_path: Path) -> None:
    p = synthetic_importance(100)
    plan = plan_blocks(p, 0.32, DEFAULT, 192)
    with pytest.raises(InputError, match="100 tokens"):
        draw_plan(plan, tmp_path / "plan.png", p[:50])
    with pytest.raises(InputError, match="cannot be written"):
        draw_plan(plan, tmp_path / "missing" / "plan.png", p)


def test_synthetic_importance_is_deterministic_and_has_its_share() -> None:
    p = synthetic_importance(50000, seed=3)
    assert torch.equal(p, synthetic_importance(50000, seed=3))
    assert not torch.equal(p, synthetic_importance(50000, seed=4))
    assert float((p >= 0.32).float().mean()) == pytest.approx(0.035, abs=0.001)
    with pytest.raises(InputError, match="tokens = -1"):
        synthetic_importance(-1)


def test_comparison_orders_the_choices_as_it_must() -> None:
    p = synthetic_importance(20000, seed=1)
    plan = plan_blocks(p, 0.32, DEFAULT, 192)
    found = compare(plan, p)
    exact = p.double()
    assert found["plan"].mass == pytest.approx(float(exact[plan.keep].sum() / exact.sum()))
    best = exact.sort(descending=True).values[: plan.n_kept].sum() / exact.sum()
    assert found["tokens"].mass == pytest.approx(float(best))
    assert found["plan"].mass <= found["tokens"].mass
    assert found["fixed"].kept <= found["plan"].kept


@pytest.mark.parametrize("mass", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_fixed_blocks_for_equal_mass_are_the_fewest(mass: float) -> None:
    p = synthetic_importance(6400, seed=2)  # whole blocks only, so best-first is optimal
    need = tokens_fixed_blocks_need(p, mass)
    exact = p.double()

    def covered(limit: int) -> float:
        return float(exact[plan_fixed_blocks(p, 64, limit).keep].sum() / exact.sum())

    assert covered(need) >= mass - 1e-9
    assert need == 0 or covered(need - 64) < mass


def test_importance_files_are_read_and_bad_ones_refused(tmp_path: Path) -> None:
    p = synthetic_importance(300)
    np.save(tmp_path / "p.npy", p.numpy())
    save_file({"importance": p, "other": p[:3].clone()}, tmp_path / "p.safetensors")
    assert torch.equal(read_importance(tmp_path / "p.npy"), p)
    assert torch.equal(read_importance(tmp_path / "p.safetensors"), p)
    save_file({"a": p, "b": p[:3].clone()}, tmp_path / "two.safetensors")
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY\x01")
    (tmp_path / "broken.safetensors").write_bytes(b"short")
    (tmp_path / "p.txt").write_text("0.5")
    for name in ("two.safetensors", "broken.npy", "broken.safetensors", "p.txt", "missing.npy"):
        with pytest.raises(InputError, match=name):
            read_importance(tmp_path / name)


def test_command_prints_tables_and_writes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"blgs": {"max_block_size": 64}}')
    plan_blocks_command(
        tokens=5000, config=config, keep_limit=100, png=tmp_path / "p.png", json_out=tmp_path / "p.json", check=True
    )
    out = capsys.readouterr().out
    assert "5,000 tokens" in out
    assert "partition" in out
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["kept"] == 100
    assert max(data["block"]["tokens"]) == 64
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_command_wants_exactly_one_source(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no input given"):
        plan_blocks_command()
    with pytest.raises(InputError, match="--text and --tokens given"):
        plan_blocks_command(text=tmp_path / "a.txt", tokens=5)


@pytest.mark.real_model
@pytest.mark.filterwarnings("ignore:no TLIF")
def test_importance_of_a_text_is_that_of_its_tokens(default_model: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = default_model
    text = "The lighthouse keeper wrote his code, 4417, on the wall. " * 250
    (tmp_path / "text.txt").write_text(text)
    settings = HiSparseConfig()
    p, channels = score_text(tmp_path / "text.txt", "default", None, settings)
    ids = torch.tensor(tokenizer(text).input_ids)
    assert p.shape == ids.shape  # more than one piece
    assert p.shape[0] > 2048
    layer = model.model.layers[0]
    with torch.no_grad():
        rows = layer.self_attn.v_proj(layer.input_layernorm(model.model.embed_tokens(ids)))
    assert channels == rows.shape[1]
    want, _ = scorer_for(ModelIdentity.of(model), settings.tlif).score(rows, None)
    torch.testing.assert_close(p, want, atol=1e-5, rtol=1e-4)
