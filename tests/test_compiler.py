"""The straight line: small models with one difficulty each come out as what they were."""

import dataclasses
import json
import math
import re
from functools import cache
from unittest import mock

import models
import pytest
import torch
from flat import compile_flat, flat_profile, verified
from makers import MAKERS, captured, structured, target_of
from torch import nn
from torch.nn import functional as F

import fxpipe
from fxpipe.capture import capture
from fxpipe.costs.whole import Whole
from fxpipe.edits import Edits, edits
from fxpipe.errors import InputError, PackageError, ScheduleError, StageError, WeightsError
from fxpipe.ir import Launch
from fxpipe.package import Package
from fxpipe.runtime.portal import Wires
from fxpipe.target import Target
from fxpipe.verify import verify


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(("devices", "schedule"), [(1, "gpipe"), (2, "1f1b"), (3, "gpipe")])
@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_a_package_computes_what_the_model_does(kind, devices, schedule, checkpoint, tmp_path):
    package = compile_flat(
        kind(),
        kwargs=MAKERS[kind](8),
        devices=["cpu"] * devices,
        microbatches=4,
        schedule=schedule,
        checkpoint=checkpoint,
        captured=captured(kind),
    )
    result = verify(package.write(tmp_path / "out"), target_of(kind), batch=10)
    assert result.equal, result
    assert [d.group for d in result.differences][-1] == "eval(): outputs"


V_OF_TWO_LOOPS = fxpipe.Schedule.from_csv(
    "0F0,0F1,2F0,2B0,2F1,0I0,2B1,0F2,0W0,2F2,0I1,2B2,0W1,0F3,2F3,2B3,0I2,0W2,0I3,0W3\n"
    "1F0,1F1,1B0,1F2,1B1,1B2,1F3,1B3\n"
)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("zb-h2", {"devices": "cpu*2"}),
        ("zb-v", {"devices": "cpu*2"}),
        ("zb-v", {"devices": "cpu*1", "checkpoint": "always"}),
        ("zb-v", {"devices": "cpu*2", "checkpoint": "except_last", "solver": "beam"}),
        ("pfeife:B_l=2,B_f=1", {"devices": "cpu*2", "loops": 2}),
        (V_OF_TWO_LOOPS, {"devices": "cpu*2"}),
    ],
)
@pytest.mark.parametrize("kind", [models.Skip, models.Tied, models.Norms])
def test_a_package_computes_it_wherever_its_stages_are(kind, schedule, options, tmp_path):
    package = compile_flat(
        kind(),
        kwargs=MAKERS[kind](8),
        microbatches=4,
        schedule=schedule,
        captured=captured(kind),
        **options,
    )
    table = package.plan.schedule
    assert package.manifest.stage_to_device == table.stage_to_device
    result = verify(package.write(tmp_path / "out"), target_of(kind), batch=10)
    assert result.equal, result


class Float32Means(nn.Module):
    """Returns means that are made in float32, whatever the model is in, as losses often are."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x):
        y = self.mix(x)
        return y, *y.detach().float().exp().mean(0)


class CountedSteps(nn.Module):
    """Returns a buffer that it writes, and what shares memory with it."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps += 1
        return self.mix(x), self.steps, self.steps.view(1, 1)


@pytest.mark.parametrize("kind", [Float32Means, CountedSteps])
def test_what_is_compared_is_what_each_micro_batch_gave(kind, tmp_path):
    def inputs(rows):
        return {"x": torch.randn(rows, 6)}

    package = compile_flat(kind(), kwargs=inputs(8), devices="cpu*2", microbatches=6)
    target = Target(kind.__name__, __file__, str(tmp_path), kind, inputs)
    result = verify(package.write(tmp_path / "out"), target, batch=13)
    assert result.equal, result


def test_micro_batches_change_places_only_where_no_buffer_is_written(tmp_path):
    swapped = fxpipe.Schedule.from_csv("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n")

    def of(kind):
        options = {"devices": "cpu*2", "microbatches": 2, "schedule": swapped}
        return compile_flat(kind(), kwargs=MAKERS[kind](8), captured=captured(kind), **options)

    with pytest.raises(ScheduleError, match=r"0F0 comes after 0F1, but stage 0 writes .* 'bn\."):
        of(models.Norms)
    assert verify(of(models.Skip).write(tmp_path / "out"), target_of(models.Skip)).equal


def test_an_edited_package_of_a_parameter_more_or_less_is_verified_in_the_others(tmp_path):
    package = compile_flat(models.Chain(), (torch.randn(8, 6),), devices=1, microbatches=4)
    out = package.write(tmp_path / "out")
    plan, stage = json.loads((out / "plan.json").read_text()), out / "stage_0.py"
    more, less = "layers.3.scale", "layers.3.bias"
    parameter = "self.layers[3].scale = nn.Parameter(self.layers[3].weight[0])"
    text = stage.read_text().replace("nn.Linear(6, 6)\n", "nn.Linear(6, 6, bias=False)\n")
    stage.write_text(text.replace("    def forward", f"        {parameter}\n\n    def forward"))
    for each in plan["state"]:
        each["name"] = each["name"].replace(less, more)
    names = plan["stages"][0]["parameters"]
    names[names.index(less)] = more
    (out / "plan.json").write_text(json.dumps(plan))
    outputs, gradients, *_ = verify(out, target_of(models.Chain)).differences
    assert (outputs.missing, gradients.missing) == ((), (less,))
    assert outputs.relative > 0


def test_what_compares_all_rows_is_of_each_micro_batch_and_said_to_be(tmp_path):
    def inputs(rows):
        return {"x": torch.randn(rows, 6), "y": torch.randn(rows, 6)}

    target = dataclasses.replace(
        target_of(models.Chain), factory=models.Contrast, make_inputs=inputs
    )
    package = compile_flat(models.Contrast(), kwargs=inputs(8), devices="cpu*2", microbatches=4)
    out = package.write(tmp_path / "out")
    result = verify(out, target, batch=10)
    assert result.equal, result
    assert [d.group for d in result.differences] == [
        "step(): outputs",
        "step(): gradients",
        "step(): buffers",
        "eval(): outputs",
    ]
    (said,) = result.notes
    assert said.startswith("output['scores'] float32[batch, batch] compares all rows")
    with pytest.raises(InputError, match=r"output\['scores'\].*fxpipe\.Runner"):
        fxpipe.load(out)(**inputs(8))


class BesideItsLoss(models.Chain):
    """A scalar, rows in dimension 0 and rows in dimension 1."""

    def forward(self, x):
        inside = x[:, None] * x.new_tensor([[1.0], [2.0], [3.0]])
        rows = self.layers(inside).mean(1)
        return rows.pow(2).mean(), rows, self.layers[0](inside).transpose(0, 1)


def test_a_batch_in_any_dimension_is_compared_beside_a_loss(tmp_path):
    package = verified(BesideItsLoss, MAKERS[models.Chain], tmp_path)
    shapes = [output.spec.shape for output in package.manifest.outputs]
    assert shapes == [(), ("batch", 6), (3, "batch", 6)]


class CastsItsTable(models.Chain):
    """The table is no buffer, but what comes decides its dtype."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(6)
        self.head = torch.nn.Linear(6, 6)

    def forward(self, x):
        if self.table.dtype != x.dtype:
            self.table = self.table.to(x.dtype)
        return super().forward(x) + self.head(self.table)


def test_a_stage_that_fails_in_float64_alone_says_how_else_to_compare(tmp_path):
    target = dataclasses.replace(target_of(models.Chain), factory=CastsItsTable)
    package = compile_flat(CastsItsTable(), (torch.randn(8, 6),), devices="cpu*2", microbatches=4)
    out = package.write(tmp_path / "out")
    with pytest.raises(
        StageError, match=r"in the dtype that it was compiled in: verify with --dtype float32"
    ):
        verify(out, target)
    assert verify(out, target, dtype="float32").equal


def test_a_stage_that_writes_in_place_what_backward_needs_is_not_told_of_dtypes(tmp_path):
    """Though torch names the dtype of what was written."""
    out = compile_flat(models.Chain(), kwargs=MAKERS[models.Chain](8), devices=2, microbatches=4)
    file = out.write(tmp_path / "out") / "stage_1.py"
    file.write_text(re.sub(r"return (.*\))", r"return (\1).exp().add_(1)", file.read_text()))
    with pytest.raises(StageError, match=r"modified by an inplace operation.*Double") as error:
        verify(tmp_path / "out", target_of(models.Chain))
    assert "--dtype" not in str(error.value)


def padded(rows):
    """Labels of which the first rows count as a whole, and the others at one place each."""
    labels = torch.randint(0, 11, (rows, 5))
    labels[rows // 2 :, 1:] = -100
    return labels


def by_tokens(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def by_rows(logits, labels):
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total / len(labels)


def of_few_rows(logits, labels):
    """Too large for the batch as a whole."""
    if len(labels) == 10:
        raise torch.OutOfMemoryError
    return by_tokens(logits, labels)


@pytest.mark.parametrize(("factor", "n_notes"), [(1 + 1e-7, 1), (1 + 1e-3, 0)])
def test_verify_tells_of_float32_where_no_more_is_apart(tmp_path, factor, n_notes):
    out = compile_flat(models.Chain(), kwargs=MAKERS[models.Chain](8), devices=2, microbatches=4)
    file = out.write(tmp_path / "out") / "stage_1.py"
    file.write_text(
        file.read_text().replace("return self.layers[", f"return {factor} * self.layers[")
    )
    result = verify(tmp_path / "out", target_of(models.Chain), batch=10)
    assert not result.equal
    assert sum("--dtype float32" in note for note in result.notes) == n_notes


@pytest.mark.parametrize(("loss", "n_notes"), [(by_tokens, 1), (by_rows, 0), (of_few_rows, 0)])
def test_verify_says_that_a_loss_is_no_mean_over_rows(tmp_path, loss, n_notes):
    """Its micro-batches' don't come to the batch's, which is none of the package's doing."""
    target = dataclasses.replace(target_of(models.Tied), loss=loss, make_targets=padded)
    package = compile_flat(
        models.Tied(), kwargs=MAKERS[models.Tied](8), devices=["cpu"] * 2, microbatches=4
    )
    result = verify(package.write(tmp_path / "out"), target, batch=10)
    assert result.equal, result
    assert len(result.notes) == n_notes
    for note in result.notes:
        assert note.startswith("the loss of the batch is ")
        assert "it is no mean over rows (README, Train)" in note


def test_verify_says_that_of_a_loss_that_the_model_makes(tmp_path):
    class Loss(models.Tied):
        def forward(self, tokens, labels):
            return by_tokens(super().forward(tokens), labels)

    def inputs(rows):
        return {"tokens": torch.randint(0, 11, (rows, 5)), "labels": padded(rows)}

    target = dataclasses.replace(target_of(models.Tied), factory=Loss, make_inputs=inputs)
    package = compile_flat(Loss(), kwargs=inputs(8), devices="cpu*2", microbatches=4)
    result = verify(package.write(tmp_path / "out"), target, batch=10)
    assert result.equal, result
    (note,) = result.notes
    assert note.startswith("output 0 of the batch is ")


class Odd(models.Chain):
    """Inputs and outputs of every form."""

    def forward(self, x, *others, settings, mask=None, mode="sum"):
        y = self.layers(x + others[0]["more"][0] * settings["scale"])
        y = y + settings["position"] if mask is None and mode == "sum" else y
        nothing = {"none": None, "list": [], "tuple": (), "dict": {}, "number": 3}
        return [y, y], {"x": x, "weight": self.layers[0].weight, **nothing}


def test_inputs_and_outputs_of_every_form(tmp_path):
    def settings():
        return {"scale": 2, "position": torch.ones(1, 6)}

    x = torch.randn(8, 6)
    model = Odd()
    package = compile_flat(
        model, (x, {"more": [x]}), {"settings": settings(), "mask": None}, devices=2, microbatches=4
    )
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    pipe.load_state_dict(model.state_dict())
    x = torch.randn(10, 6)
    expected = model(x, {"more": [x]}, settings=settings())
    found = pipe(x, {"more": [x]}, settings=settings())
    torch.testing.assert_close(found, expected)
    assert found[0][0] is found[0][1]
    assert found[1]["x"] is x
    with pytest.raises(InputError, match="must be a tuple of 1"):
        pipe(x, {"more": [x]}, x, settings=settings())


def test_a_cache_may_be_an_input_too(tmp_path):
    def inputs(rows):
        past = models.Cache()
        for k in range(3):
            past.update(k, torch.randn(rows, 1, 6))
        return {"x": torch.randn(rows, 2, 6), "past": past}

    target = dataclasses.replace(target_of(models.Cached), make_inputs=inputs)
    package = compile_flat(models.Cached(), kwargs=inputs(8), devices="cpu*2", microbatches=4)
    assert verify(package.write(tmp_path / "out"), target, batch=10).equal


def test_what_training_alone_gives_is_computed_and_sent_in_training_alone(tmp_path):
    x = torch.randn(8, 6)
    package = compile_flat(models.Auxiliary(), (x,), devices="cpu*3", microbatches=4)
    train, evaluation = (Wires.of(package.manifest, mode) for mode in (True, False))
    only = train.readers.keys() - evaluation.readers.keys()
    assert sorted(wire.value for wire in only) == ["aux", "hidden", "penalty"]
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    assert type(pipe(x)) is models.Answer
    for parameter in pipe.get_submodule("aux").parameters():
        parameter.data.fill_(math.nan)
    assert pipe.eval()(x)["answer"].isfinite().all()


def test_a_stage_may_take_nothing_and_hand_nothing_on(tmp_path):
    target = dataclasses.replace(target_of(models.Chain), factory=models.Counted)
    package = compile_flat(models.Counted(), (torch.randn(8, 6),), devices="cpu*2", microbatches=4)
    assert package.wiring.stages[0].inputs == package.wiring.stages[0].outputs == ()
    assert verify(package.write(tmp_path / "out"), target, batch=10).equal


def test_state_has_the_models_keys_in_its_order_unused_ones_too(tmp_path):
    model = models.Structured()
    package = compile_flat(model, kwargs=structured(8), devices="cpu*2", microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [n for n, _ in model.named_parameters()]
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {n: p.requires_grad for n, p in pipe.named_parameters()} == trained
    pipe.load_state_dict(model.state_dict())
    model.load_state_dict(pipe.state_dict())


def test_weights_of_another_model_are_refused_whole(tmp_path):
    package = compile_flat(models.Skip(), (torch.randn(8, 6),), devices="cpu*2", microbatches=2)
    pipe = fxpipe.load(package.write(tmp_path / "out"))
    before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    with pytest.raises(WeightsError, match=r"first\.weight"):
        pipe.load_state_dict(models.Chain().state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())


def test_plans_for_captured_steps_wait_for_no_host():
    model, x = models.Chain(), torch.randn(8, 6)
    profile = flat_profile(capture(model, (x,), {}), 2)
    profile = dataclasses.replace(profile, launch=Launch(forward_ms=9.0, backward_ms=9.0))

    def estimate(**options):
        package = fxpipe.compile(
            model, (x,), devices="cpu*2", microbatches=2, profile=profile, **options
        )
        return package.manifest.estimate

    waiting, captured = estimate(), estimate(capture="graph")
    assert waiting.step_ms > waiting.captured_ms == captured.step_ms
    assert captured.captured_ms is None


def test_a_profile_of_another_model_or_microbatch_is_refused():
    model, x = models.Chain(), torch.randn(8, 6)
    other = flat_profile(capture(models.Skip(), (x,), {}), 2)
    with pytest.raises(InputError, match="another model"):
        fxpipe.compile(model, (x,), devices="cpu*2", microbatches=2, profile=other)
    own = flat_profile(capture(model, (x,), {}), 2)
    with pytest.raises(InputError, match=r"micro-batches of 4 rows, but .* has 2"):
        fxpipe.compile(model, (x,), devices="cpu*2", microbatches=4, profile=own)
    with pytest.raises(InputError, match=r"a batch of 8 in 1 micro-batch has 8"):
        fxpipe.compile(model, (x,), devices="cpu*2", microbatches=1, profile=own)


def test_processes_on_cpus_are_planned_with_the_time_that_they_spend_on_sending():
    def step_ms(device, topology):
        package = fxpipe.compile(
            models.Chain(),
            (torch.randn(8, 6),),
            devices="cpu*2",
            microbatches=8,
            profile=f"analytic:{device}",
            topology=topology,
        )
        return package.plan.estimate.step_ms

    # Eight values go there and eight gradients back; on GPUs nothing but the link is busy.
    assert step_ms("cpu", "2:eth10") > step_ms("cpu", None) + 16 * 0.2
    assert step_ms("h100", "2:eth10") < step_ms("h100", None) + 3.2


@pytest.mark.parametrize(("topology", "apart"), [("2:eth10", True), (None, False)])
def test_lanes_with_links_between_them_are_measured_as_processes(monkeypatch, topology, apart):
    seen = []

    def whole_ms(*args):
        seen.append(args[-1])
        return Whole(1.0, 1.0, 2.0, 0.0)

    monkeypatch.setattr("fxpipe.passes.profile.whole_ms", whole_ms)
    args = (torch.randn(8, 6),)
    fxpipe.compile(models.Chain(), args, devices="cpu*2", microbatches=2, topology=topology)
    assert seen == 3 * [apart]


@pytest.mark.parametrize("made", [models.Chain, models.Paths, models.Auxiliary])
def test_a_profile_has_all_that_another_plan_needs(made):
    model, args = made(), (torch.randn(8, 6),)
    measured = fxpipe.compile(model, args, devices="cpu*2", microbatches=2).profile
    again = fxpipe.compile(model, args, devices="cpu*3", microbatches=2, profile=measured)
    assert again.profile == measured


def test_sparse_gradients_are_measured_counted_and_right(tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 3)

        def forward(self, words):
            return self.head(self.words(words).mean(1))

    def loss_fn(output, target):
        return (output - target).square().mean()

    model, words, target = Words(), torch.randint(50, (8, 4)), torch.randn(8, 3)
    package = fxpipe.compile(model, (words,), devices="cpu*2", microbatches=4)
    pipe = fxpipe.load(package.write(tmp_path / "out", weights=True))
    pipe.step(words, target=target, loss_fn=loss_fn)
    loss_fn(model(words), target).backward()
    found, expected = pipe.words.weight.grad, model.words.weight.grad
    assert found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    with pipe.memory() as memory:
        pipe.step(words, target=target, loss_fn=loss_fn)
    assert all(peak.measured_bytes > 0 for peak in memory.peaks)


@cache
def package_of_chain():
    return compile_flat(models.Chain(), (torch.randn(8, 6),), devices="cpu*2", microbatches=2)


def test_settings_that_do_not_exist_are_told_at_once_and_before_the_work():
    wrong = {"microbatches": 0, "schedule": "fast", "checkpoint": "some", "solver": "magic"}
    wrong["capture"] = ""
    with (
        mock.patch("fxpipe.compiler.capture_model", side_effect=AssertionError),
        pytest.raises(InputError) as error,
    ):
        fxpipe.compile(models.Chain(), (torch.randn(8, 6),), devices=2, **wrong)
    assert str(error.value).splitlines() == [
        "microbatches is a whole number, at least 1, not 0",
        "there is no schedule 'fast': use one of gpipe, 1f1b, interleaved, bfs, zb-h1, "
        "zb-h2, zb-v, pfeife, auto, cpsat",
        "there is no checkpoint mode 'some': use one of never, except_last, always, auto",
        "there is no solver 'magic': use one of dp, beam, cpsat",
        "there is no capture '': use one of graph",
    ]


def test_a_package_is_told_in_a_line():
    package = compile_flat(models.Chain(), (torch.randn(8, 6),), devices=2, microbatches=4)
    assert repr(package) == "<package of Chain: 2 stages, 4 micro-batches, 1f1b>"


def test_a_package_of_ours_is_replaced_whole(tmp_path):
    out = package_of_chain().write(tmp_path / "out")
    three = compile_flat(models.Skip(), (torch.randn(8, 6),), devices="cpu*3", microbatches=2)
    three.write(out)
    package_of_chain().write(out)
    written = {path.name for path in out.iterdir()}
    assert written == {*package_of_chain().files, "plan.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_old_package_stays_if_the_new_one_can_not_be_written(tmp_path):
    package, out = package_of_chain(), tmp_path / "out"
    package.write(out)
    with (
        mock.patch.object(Package, "_write_new", side_effect=OSError("disk full")),
        pytest.raises(PackageError, match="can't be written: disk full"),
    ):
        package.write(out)
    assert edits(out) == Edits()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda out: out.write_text("mine"), "is no folder"),
        (lambda out: (out.mkdir(), (out / "thesis.txt").write_text("mine")), "no fxpipe package"),
        (
            lambda out: (package_of_chain().write(out), (out / "thesis.txt").write_text("mine")),
            "thesis.txt, which would be lost",
        ),
    ],
)
def test_what_is_not_ours_is_never_overwritten(prepare, says, tmp_path):
    out = tmp_path / "out"
    prepare(out)
    with pytest.raises(PackageError, match=says):
        package_of_chain().write(out)
    kept = out if out.is_file() else out / "thesis.txt"
    assert kept.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
