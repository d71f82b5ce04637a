"""What `fxpipe compile` says on its way."""

from fxpipe.show.compiling import choice_text


def test_devices_are_told_in_words():
    choice = choice_text("2", ["cpu", "cpu"], 1)
    assert choice == "devices: 2 CPU lanes, since this machine has 1 CUDA device"
    assert choice_text("2", ["cuda:0", "cuda:1"], 2) == "devices: cuda:0, cuda:1"
    assert choice_text("cpu*2", ["cpu", "cpu"], 0) == "devices: 2 CPU lanes"
