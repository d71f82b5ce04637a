"""What fxpipe uses of torch that is private or half so, by the one place that uses it.

Tried with torch 2.11 and 2.13. If a name is gone in another version, its place is all there is to
mend.
"""

import importlib
import inspect
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SETATTR = (
    "SetAttrBuiltinVariable._call_setattr"
    if torch.__version__ >= (2, 13)
    else "BuiltinVariable.call_setattr"
)
PRIVATE = {
    "torch._dynamo.functional_export._dynamo_graph_capture_for_export": "capture/dynamo.py",
    "torch._dynamo.functional_export._compiling_state_context": "capture/dynamo.py",
    "torch._dynamo.variables.torch.tracing_state_functions": "capture/dynamo.py",
    "torch.compiler._is_compiling_flag": "capture/dynamo.py",
    "torch._higher_order_ops.associative_scan": "capture/dynamo.py",
    "torch._dynamo.convert_frame.compile_lock": "runtime/random.py",
    "torch._dynamo.guards.build_guard_function": "capture/dynamo.py",
    "torch._dynamo.trace_rules.is_callable_allowed": "capture/rules.py",
    "torch._dynamo.variables.misc.produce_trampoline_autograd_apply": "capture/dynamo.py",
    f"torch._dynamo.variables.builtin.{SETATTR}": "capture/rules.py",
    "torch._dynamo.variables.builtin.BuiltinVariable.call_function_handler_cache": (
        "capture/rules.py"
    ),
    "torch._dynamo.variables.tensor.TensorVariable.method_attr_dtype": "capture/dtype_reads.py",
    "torch._dynamo.variables.user_defined.UserDefinedClassVariable.call_function": (
        "capture/dtype_reads.py"
    ),
    "torch._C._autograd._get_current_graph_task_keep_graph": "runtime/compiled.py",
    "torch._C._get_tracing_state": "runtime/transforms.py",
    "torch._C._get_dispatch_mode": "runtime/transforms.py",
    "torch._ops._get_dispatch_mode_pre_dispatch": "runtime/transforms.py",
    "torch.distributions.Distribution._validate_args": "capture/dynamo.py",
    "torch._dynamo.metrics_context": "quiet.py",
    "torch._dynamo.variables.constant.ConstantVariable.create": "capture/rules.py",
    "torch._dynamo.variables.tensor.TensorVariable.unpack_var_sequence": "capture/rules.py",
    "torch._dynamo.variables.tensor.TensorVariable.method_requires_grad_": "capture/rules.py",
    "torch._dynamo.variables.torch.TorchInGraphFunctionVariable.call_function": "capture/rules.py",
    "torch._dynamo.variables.tensor.TensorVariable.synchronize_attributes": "capture/rules.py",
    "torch._dynamo.output_graph.OutputGraph.current_tracer": "capture/rules.py",
    "torch.nn.modules.transformer._detect_is_causal_mask": "capture/causal.py",
    "torch._dynamo.variables.functions.UserFunctionVariable.call_function": "capture/causal.py",
    "torch._dynamo.exc.TorchDynamoException": "capture/dynamo.py",
    "torch._dynamo.config.ignore_logging_functions": "capture/dynamo.py",
    "torch._dynamo.config.allow_rnn": "capture/dynamo.py",
    "torch._C._functorch.get_dynamic_layer_stack_depth": "capture/dynamo.py",
    "torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth": "capture/dynamo.py",
    "torch.nn.modules.batchnorm._BatchNorm": "capture/dynamo.py, runtime/batchnorm.py",
    "torch.fx.experimental.symbolic_shapes.ConstraintViolationError": "capture/dynamo.py",
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode": "capture/dynamo.py",
    "torch._compile._disable_dynamo": "runtime/batchnorm.py",
    "torch.ops.higher_order.tag_activation_checkpoint": "capture/graph.py",
    "torch._C._autograd._get_data_attr": "capture/graph.py",
    "torch.utils.checkpoint.CheckpointFunction": "no_checkpoints.py",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": "no_checkpoints.py",
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "capture/calls.py, capture/observe.py, costs/counted.py, costs/roofline.py, memory.py, "
        "runtime/drawing.py, runtime/memory.py, runtime/promises.py"
    ),
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "runtime/promises.py",
    "torch._subclasses.fake_tensor.FakeTensor": "capture/graph.py, memory.py",
    "torch._subclasses.fake_tensor.FakeTensorMode": "memory.py",
    "torch.nn.modules.module.register_module_parameter_registration_hook": "memory.py",
    "torch.utils.weak.WeakIdKeyDictionary": "memory.py",
    "torch.utils.flop_counter.flop_registry": "costs/roofline.py",
    "torch.Tag.nondeterministic_seeded": "runtime/drawing.py, runtime/promises.py",
    "torch.utils._pytree.tree_map": "costs/meter.py",
    "torch.utils._sympy.printers.PythonPrinter": "capture/sizes.py",
    "torch.utils._sympy.functions.CeilToInt": "capture/whole.py",
    "torch.utils._sympy.functions.FloatTrueDiv": "capture/whole.py",
    "torch.utils._sympy.functions.FloorDiv": "capture/dynamo.py, capture/whole.py",
    "torch.utils._sympy.functions.FloorToInt": "capture/whole.py",
    "torch.utils._sympy.functions.IntTrueDiv": "capture/whole.py",
    "torch.utils._sympy.functions.ToFloat": "capture/whole.py",
    "torch.utils._sympy.functions.TruncToInt": "capture/whole.py",
    "torch.utils._sympy.functions.Mod": "capture/dynamo.py",
    "torch.utils._sympy.functions.PythonMod": "capture/dynamo.py",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._maybe_evaluate_static": "capture/dynamo.py",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._set_replacement": "capture/sizes_equated.py",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._update_var_to_range": (
        "capture/sizes_equated.py"
    ),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.bound_sympy": "capture/sizes_equated.py",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.replace": "capture/sizes.py",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": "capture/dynamo.py, capture/sizes.py",
    "torch.fx.experimental._config.use_duck_shape": "capture/dynamo.py",
    "torch._dynamo.maybe_mark_dynamic": "capture/dynamo.py, capture/frame.py",
    "torch.fx.node.map_aggregate": "capture/edit.py, costs/straight.py",
    "torch._C._set_grad_enabled": "ops/regions.py",
    "torch.autograd.grad_mode._enter_inference_mode": "ops/regions.py",
    "torch.autograd.grad_mode._exit_inference_mode": "ops/regions.py",
    "torch.amp.autocast_mode._enter_autocast": "ops/regions.py",
    "torch.amp.autocast_mode._exit_autocast": "ops/regions.py",
    "torch._inductor.config.post_grad_custom_pre_pass": "runtime/stage.py",
    "torch._inductor.custom_graph_pass.CustomGraphPass": "runtime/written_out.py",
    "torch._inductor.custom_graph_pass.get_hash_for_files": "runtime/written_out.py",
    "torch.nn.attention._backend_from_string": "ops/regions.py",
    "torch.nn.attention._cur_sdpa_kernel_backends": "runtime/attention.py",
    "torch.nn.attention._sdpa_kernel": "ops/regions.py, runtime/attention.py",
    "torch._C._nn.scaled_dot_product_attention": "capture/modes.py",
    "torch._dynamo.exc.TensorifyScalarRestartAnalysis": "capture/frame.py",
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx": (
        "capture/dtype_reads.py, capture/frame.py"
    ),
    "torch._dynamo.symbolic_convert.InliningInstructionTranslator.inline_call_": (
        "capture/formals.py"
    ),
    "torch._dynamo.symbolic_convert.InliningGeneratorInstructionTranslator.dispatch_table": (
        "capture/texts.py"
    ),
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.BUILD_STRING": "capture/texts.py",
    "torch._dynamo.symbolic_convert.SpeculationLog.clear": "capture/frame.py",
    "torch._dynamo.side_effects.SideEffects.has_pending_mutation_of_attr": "capture/formals.py",
    "torch._dynamo.side_effects.SideEffects.load_cell": "capture/formals.py",
    "torch._dynamo.variables.CellVariable": "capture/formals.py",
    "torch._dynamo.variables.lazy.LazyVariableTracker.is_realized": "capture/formals.py",
    "torch._dynamo.variables.lazy.LazySymNodeFormatString": "capture/texts.py",
    "torch._dynamo.variables.misc.StringFormatVariable": "capture/texts.py",
    "torch._dynamo.variables.lists.BaseListVariable": "capture/formals.py",
    "torch._dynamo.variables.misc.NumpyVariable.call_function": "capture/numpy_numbers.py",
    "torch._dynamo.variables.nn_module.record_nn_module_stack": "capture/rules.py",
    "torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable": "capture/formals.py",
    "torch.Tensor._backward_hooks": "capture/refuse.py, runtime/weight_gradients.py",
    "torch.Tensor._post_accumulate_grad_hooks": ("capture/check.py, runtime/weight_gradients.py"),
    "torch.nn.Module._apply": (
        "precision.py, runtime/distributed/engine.py, runtime/weights/original.py"
    ),
    "torch.nn.Module._compiled_call_impl": "runtime/drawing.py, runtime/stage.py",
    "torch.amp.GradScaler._unscale_grads_": "runtime/distributed/overflow.py",
    "torch.cuda._sleep": "runtime/stream.py",
    "torch._C._cuda_clearCublasWorkspaces": "costs/libraries.py",
    "torch._utils._flatten_dense_tensors": "runtime/written.py",
    "torch._utils._unflatten_dense_tensors": "runtime/written.py",
    "torch.Tensor._indices": "runtime/memory.py",
    "torch.Tensor._values": "runtime/memory.py",
    "torch._foreach_zero_": "runtime/graph.py",
    "torch.autograd.graph.get_gradient_edge": "runtime/step.py",
    "torch.autograd.graph._engine_run_backward": "runtime/backward.py",
    "torch.distributed.distributed_c10d._get_default_store": "runtime/distributed/ranks.py",
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._load_csv": (
        "runtime/torch_pipelining/schedule.py, tests/passes/test_order_in_torch.py"
    ),
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._split_inputs": (
        "runtime/torch_pipelining/schedule.py"
    ),
    "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._merge_outputs": (
        "runtime/torch_pipelining/schedule.py"
    ),
}


@pytest.mark.parametrize("name", PRIVATE)
def test_it_is_there(name):
    if "_cuda_" in name and not torch.backends.cuda.is_built():
        pytest.skip("this torch is built without CUDA")
    parts = name.split(".")
    found = importlib.import_module("torch")
    for place, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:place]))
        found = getattr(found, part)


@pytest.mark.parametrize(("name", "places"), PRIVATE.items())
def test_it_is_used_where_the_table_says(name, places):
    for place in places.split(", "):
        folder = ROOT if place.startswith("tests") else ROOT / "fxpipe"
        assert name.split(".")[-1] in (folder / place).read_text()


def test_the_capture_takes_a_module_and_returns_a_function_of_its_inputs():
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export

    assert next(iter(inspect.signature(_dynamo_graph_capture_for_export).parameters)) == "mod"


def test_the_capture_tells_that_it_exports_by_the_state_that_is_replaced():
    from torch._dynamo.functional_export import _compiling_state_context

    with _compiling_state_context():
        assert torch.compiler.is_exporting()
        assert torch.compiler.is_compiling()


def test_a_trace_keeps_where_sizes_became_numbers():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    assert ShapeEnv().specialization_stacks == {}
