"""What a backward keeps is told, and let go of."""

import gc
import weakref

import torch
from torch.nn import functional as F

from fxpipe.costs.saved import computed, owners

CPU = torch.device("cpu")


def test_an_op_in_place_that_saves_its_result_is_let_go_of():
    x = torch.ones(1000, requires_grad=True)
    result, _, saved = computed(lambda: F.relu(x.clone(), inplace=True), CPU)
    assert owners(saved, [x], [result], []) == (("result", 4000),)
    alive = weakref.ref(result.untyped_storage())
    del result, saved
    gc.collect()
    assert alive() is None
