"""Fork and join make backward follow an order that the data does not ask for."""

import torch

from fxpipe.runtime.dependency import fork, join


def test_what_came_before_the_fork_waits_for_what_came_after_the_join():
    order = []

    def logged(x, name):
        y = x * 1
        y.register_hook(lambda grad: order.append(name))
        return y

    for with_dependency in (False, True):
        order.clear()
        a = torch.ones(2, requires_grad=True)
        b = torch.ones(2, requires_grad=True)
        early, phony = fork([logged(a, "early")])
        late = [b]
        if with_dependency:
            late = join(late, phony)
        late = logged(late[0], "late")
        for _ in range(5):
            # A longer way: without the dependency, its backward would come last.
            late = late * 1
        # Backward takes what was made last first.
        (late.sum() + (early[0] * 1).sum() if with_dependency else early[0].sum()).backward()
        if with_dependency:
            assert order == ["late", "early"]
    assert torch.equal(a.grad, torch.ones(2))
    assert torch.equal(b.grad, torch.ones(2))


def test_values_without_gradient_pass_as_they_are():
    whole = torch.arange(3)
    forked, phony = fork([whole])
    assert forked[0] is whole
    assert phony is None
    x = torch.ones(2, requires_grad=True) * 1
    forked, phony = fork([whole, x])
    assert forked[0] is whole
    joined = join([whole], phony)
    assert joined[0] is whole


def test_a_forked_value_shares_memory_and_may_be_written_in_place():
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    (forked,), phony = fork([y])
    (joined,) = join([forked], phony)
    assert joined.data_ptr() == y.data_ptr()
    torch.relu_(joined).sum().backward()
    assert torch.equal(x.grad, 2.0 * (x > 0))
