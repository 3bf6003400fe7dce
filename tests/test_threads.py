"""One model, several images on their way: threads, gradient checkpointing, blocks computed again in any order."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch.autograd.graph import saved_tensors_hooks

import isomorph as iso
from small_models import MODELS, build, images


@pytest.fixture
def busy():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    "name", [name for name in MODELS if not name.startswith("vit, ")]
)  # those are law rows
def test_threads_share_a_model(name, busy):
    """200 forwards where a layer asks for its grid or keeps something between calls, fewer where none does."""
    asks = any(word in name for word in ("convit", "spatial", "gpsa", "coatnet"))
    model = build(name)
    batch = images(name, part=1 if name == "vanillanet" else 2)
    with torch.no_grad():
        expected = [model(x) for x in batch]

        def wrong(turn):
            x = batch[turn]
            y = expected[turn]
            with torch.no_grad():
                return sum(
                    not torch.allclose(model(x), y, rtol=1e-9, atol=1e-11)
                    for _ in range(100 if asks else 15)
                )

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(wrong, [0, 1])) == [0, 0]


def backward(outputs):
    sum(y.square().sum() for y in outputs).backward()


def gradients(model, run):
    model.zero_grad()
    backward(run(model))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11, msg=name)


def both(batch):
    return lambda model: [model(x) for x in batch]


@pytest.mark.parametrize("name", MODELS)
def test_two_sizes_before_one_checkpointed_backward(name):
    model = build(name)
    batch = images(name)
    expected = gradients(model, both(batch))
    model.set_grad_checkpointing()
    same(gradients(model, both(batch)), expected)


POSITIONED = ["vit, gpsa exact", "vit, refined spatial", "vit, refined spatial, recomputed"]


@pytest.mark.parametrize("name", POSITIONED)
class TestBlocksComputedAgain:
    """By whoever asks for it: what a block reads is all that is sure to come back."""

    def test_reentrant(self, name, monkeypatch):
        model = build(name)
        batch = [x.requires_grad_() for x in images(name)]
        expected = gradients(model, both(batch))
        monkeypatch.setattr(timm.layers.config, "_USE_REENTRANT_CKPT", True)
        model.set_grad_checkpointing()
        same(gradients(model, both(batch)), expected)

    def test_in_another_thread(self, name):
        """As on a GPU, where blocks are computed again by a thread of the backward pass."""
        model = build(name)
        batch = images(name)
        expected = gradients(model, both(batch))
        model.set_grad_checkpointing()
        model.zero_grad()
        outputs = both(batch)(model)
        model(images(name)[1])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(backward, outputs).result()
        same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)

    def test_tokens_that_hooks_have_replaced(self, name):
        """As where they lie on another device meanwhile; sizes with as many tokens cannot be told apart."""
        model = build(name)
        batch = [images(name)[0], torch.cat([images(name)[0]] * 2, 2)]
        expected = gradients(model, both(batch))
        model.set_grad_checkpointing()
        with saved_tensors_hooks(torch.clone, torch.clone):
            same(gradients(model, both(batch)), expected)
            with pytest.raises(iso.UserError, match="may have the grids"):
                gradients(model, both([batch[0], batch[0].mT]))


@pytest.mark.parametrize("name", POSITIONED[:2])
class TestGridsOfCalls:
    def test_a_layer_on_its_own_takes_its_grid(self, name):
        """Also after a forward that failed, which leaves nothing behind."""
        model = build(name)
        batch = images(name)
        layer = model.blocks[0].attn
        tokens = torch.randn(1, 9, 36).double()
        with torch.no_grad():
            handle = model.blocks[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(batch[1])
            handle.remove()
            model(batch[0])
            assert layer.grid_size == (4, 2)
            tall = layer(tokens)
            wide = layer(tokens, grid_size=(2, 4))
            assert not torch.allclose(tall, wide)
            torch.testing.assert_close(layer(tokens, grid_size=(4, 2)), tall)
            assert torch.equal(layer.attention(tokens), layer.attention(tokens, grid_size=(4, 2)))
            torch.testing.assert_close(model(batch[1]), copy.deepcopy(model)(batch[1]))

    def test_copies_have_grids_of_their_own(self, name):
        model = build(name)
        batch = images(name)
        with torch.no_grad():
            expected = [model(x) for x in batch]
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                # one embeds while the other is on its way
                for student, teacher in ((model, twin), (twin, model)):
                    tokens = student._pos_embed(student.patch_embed(batch[0]))
                    torch.testing.assert_close(teacher(batch[1]), expected[1])
                    torch.testing.assert_close(
                        student.head(student.norm(student.blocks(tokens))[:, 0]), expected[0]
                    )
