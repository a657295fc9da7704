"""The whole set-up: klgrad installed, pytest run. The fixtures come with it."""

from kl_loss import kl_loss


def test_the_loss_is_the_kl_gradient(assert_gradient, assert_mask_invariant, assert_finite):
    assert_gradient(kl_loss, placement="loss", target="sequence")
    assert_mask_invariant(kl_loss)
    assert_finite(kl_loss)
