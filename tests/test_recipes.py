"""Recipes say what the papers and their code say, and nothing that a library would quietly change."""

import pytest
from timm.data import create_transform

import isomorph as iso
from isomorph.training.parts import magnitudes


class TestPolicies:
    @pytest.mark.parametrize(
        ("policy", "said"),
        [
            ("rand-m15-n2", "timm clamps the magnitude 15 to 10; add -mmax15 to have it, or write m10"),
            ("rand-mstd0.5-n2-m11", "timm clamps the magnitude 11 to 10; add -mmax11"),
            ("rand-m9-mmax5", "timm clamps the magnitude 9 to 5; add -mmax9 to have it, or write m5"),
            ("augmix-m12-w3", "timm clamps the magnitude 12 to 10; write m10"),
        ],
    )
    def test_a_clamped_policy_is_rejected_with_the_fix(self, policy, said):
        with pytest.raises(iso.UserError, match=said) as caught:
            iso.load_recipe("cifar_cnn", [f"augment.auto_augment={policy}"])
        assert "augment.auto_augment" in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("policy", ["rand-m10-mstd0.5-inc1", "rand-m15-n2-mmax15", "augmix-m10", "original", "3a"])
    def test_others_are_taken_as_they_are(self, policy):
        assert iso.load_recipe("cifar_cnn", [f"augment.auto_augment={policy}"]).augment.auto_augment == policy

    @pytest.mark.parametrize(("name", "magnitude", "degrees"), [("coatnet_2_384", 15, 45.0), ("coatnet_3_512", 20, 60.0)])
    def test_coatnet_rotates_as_far_as_google_does(self, name, magnitude, degrees):
        policy = iso.load_recipe(name).augment.auto_augment
        transform = create_transform(32, is_training=True, auto_augment=policy)
        assert set(magnitudes(transform)) == {(magnitude, 30)}
        (operations,) = [step for step in transform.transforms if hasattr(step, "ops")]
        assert operations.num_layers == 2
        assert {operation.prob for operation in operations.ops} == {1.0}
        (rotate,) = [operation for operation in operations.ops if operation.name == "Rotate"]
        seen = []
        rotate.aug_fn = lambda image, angle, **_: seen.append(abs(angle))
        rotate(None)
        assert seen == [degrees]
