"""What an added method tells is attacked as what fedda's own methods tell."""

import pytest
import torch

from fedda import plugins
from fedda.contrib.audit import gradients
from fedda.errors import ConfigError
from tests.test_plugins import ALGORITHM, Install, add_tent, install

__all__ = ["install"]  # a fixture

ATTACKED = ALGORITHM.replace(
    "0.1}})",
    "0.1}}, vote=lambda o, p: o.pace * p.amax(dim=2).mean(dim=0),"
    ' loss=lambda o: "cada", windows=lambda o, about: 7 * about.sites)',
).replace(
    'how fast")\n',
    "how fast\")\n    discriminator: DiscriminatorConfig = DiscriminatorConfig(sizes='5')\n",
)
ATTACKED = "from fedda.adversarial.discriminators import DiscriminatorConfig\n" + ATTACKED


def test_what_an_added_method_tells_is_attacked_as_of_any_other(install: Install) -> None:
    add_tent(install, algorithm=ATTACKED)
    found = gradients.SumSettings.of({"method": "tent"})
    assert (found.method, found.loss, found.network.hidden) == ("tent", "cada", (5,))
    with pytest.raises(ConfigError, match=r"fedavg has no discriminator.*, tent have one"):
        gradients.SumSettings.of({"method": "fedavg"})
    assert gradients.planned({"method": "tent"}, {"sites": [{"role": "source"}] * 3}, 4) == 21
    tent = plugins.method("tent")
    p = torch.tensor([[[0.5, 0.5], [0.9, 0.1]]])
    assert tent.vote is not None
    assert tent.vote(tent.config(), p).tolist() == pytest.approx([0.25, 0.45])
