"""A class is called as the user's; variants by what is their own."""

from itertools import islice

from fxpipe.codegen.class_names import class_names

PLAIN = (["conv"], ["layer1.1", "layer2.1"])


def best(kind, made, others=()):
    """The first name, and what else is wished if there are others of the kind."""
    first, *rest = islice(class_names(kind, made, others), 2)
    return rest[0] if others else first


def test_the_name_is_the_users():
    assert best("GPT2Block", PLAIN) == "GPT2Block"


def test_what_no_class_can_be_called_is_left_out():
    assert best("_Übung", PLAIN) == "bung"
    assert best("2d", PLAIN) == "Block2d"


def test_a_variant_is_called_by_a_module_that_only_it_has():
    variant = (["conv", "downsample.0", "downsample.1"], ["layer2.0", "layer3.0"])
    assert best("Bottleneck", variant, [PLAIN]) == "BottleneckWithDownsample"


def test_a_variant_is_called_as_only_its_modules_are():
    self_attention = (["q", "k"], ["h.0.SelfAttention", "h.1.SelfAttention"])
    cross_attention = (["q", "k"], ["h.0.EncDecAttention", "h.1.EncDecAttention"])
    assert best("T5Attention", cross_attention, [self_attention]) == "EncDecAttention"


def test_others_have_a_number():
    assert best("Attention", (["q"], ["0.attn"]), [(["q"], ["1.attn"])]) == "Attention2"
