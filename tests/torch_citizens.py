"""What torch asks of every layer: autocast, bfloat16, copies, pickles and the meta device."""

import copy
import pickle

import torch
from torch import nn


class TorchCitizens:
    """Laws of `self.layer` on the batch of two `self.x`, which a test class prepares."""

    def test_autocast_and_bfloat16(self):
        expected = self.layer(self.x)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(self.x)
        y.float().sum().backward()
        assert y.dtype == torch.bfloat16
        for p in self.layer.parameters():
            assert p.grad.isfinite().all()
        assert (y - expected).abs().max() < 0.04 * expected.abs().max()  # bfloat16 has 8 bits
        z = copy.deepcopy(self.layer).bfloat16()(self.x.bfloat16())
        assert (z - expected).abs().max() < 0.04 * expected.abs().max()

    def test_every_dropout_acts_in_training_alone(self):
        layer = copy.deepcopy(self.layer)
        still = self.layer.eval()(self.x)
        for drop in (module for module in layer.modules() if isinstance(module, nn.Dropout)):
            drop.p = 0.5
            torch.testing.assert_close(layer.eval()(self.x), still)
            assert not torch.allclose(layer.train()(self.x), still, atol=1e-3)
            drop.p = 0.0

    def test_copies_pickles_and_builds_on_meta(self):
        for twin in (copy.deepcopy(self.layer), pickle.loads(pickle.dumps(self.layer))):
            assert torch.equal(twin(self.x), self.layer(self.x))
        before = set(vars(self.layer)), list(self.layer.state_dict())
        self.layer.attention(self.x)
        assert (set(vars(self.layer)), list(self.layer.state_dict())) == before
        assert self.layer.to("meta")(self.x.to("meta")).shape[0] == 2
