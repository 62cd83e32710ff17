"""The TLIF network: value rows and window statistics in, importance out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hisparse.errors import ModelError
from hisparse.tlif.statistics import STATISTICS

PARAMETER_LIMIT = 15_000  # learned parameters stay below this


def inputs_of(features: int) -> int:
    """Inputs of the network for value rows of `features` values: a row, the row before it, the statistics."""
    return 2 * features + len(STATISTICS)


def hidden_width(features: int) -> int:
    """Largest hidden width for value rows of `features` values that keeps the network under the parameter limit.

    A width of n spends n * (inputs + 2) + 1 parameters. Raises ModelError where not even one unit fits.
    """
    width = (PARAMETER_LIMIT - 2) // (inputs_of(features) + 2)
    if width < 1:
        raise ModelError(
            f"value rows of {features} values leave no room for a network of fewer than {PARAMETER_LIMIT} parameters; "
            'set tlif.scorer = "novelty"'
        )
    return width


class Tlif(nn.Module):
    """Two Linear layers with GELU between: fewer than 15 000 parameters whatever the width of the input."""

    def __init__(self, features: int, hidden: int | None = None) -> None:
        super().__init__()
        self.features = features
        self.first = nn.Linear(inputs_of(features), hidden_width(features) if hidden is None else hidden)
        self.second = nn.Linear(self.first.out_features, 1)

    @property
    def parameters_learned(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits float32 [N] of inputs float32 [N, 2 * features + statistics] (see `network_inputs`)."""
        logits: Tensor = self.second(nn.functional.gelu(self.first(inputs)))
        return logits.squeeze(-1)

    @torch.no_grad()
    def fold_input_scaling(self, mean: Tensor, scale: Tensor) -> None:
        """Absorb ``(x - mean) / scale`` (each [inputs]) into the first layer, so that inference reads raw rows."""
        weight = self.first.weight / scale
        self.first.bias.sub_(weight @ mean)
        self.first.weight.copy_(weight)

    @torch.no_grad()
    def fold_calibration(self, slope: float, offset: float) -> None:
        """Absorb ``slope * logit + offset`` into the second layer."""
        self.second.weight.mul_(slope)
        self.second.bias.mul_(slope).add_(offset)
