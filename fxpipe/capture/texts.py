"""Texts that tell of open sizes, as of messages of checks: no size is fixed to write them.

Dynamo fixes a size as it becomes part of an f-string, be it of a message that nobody sees. Here it
is fixed as the text is used: as a key, or compared. Private to torch: tests/test_private.py.
"""

import dis
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch._dynamo.variables.lazy import LazySymNodeFormatString, LazyVariableTracker
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols


class _Text(LazySymNodeFormatString):
    """Parts of an f-string, some of which tell of sizes."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        """The text, for which the sizes are fixed."""
        return "".join(part.as_python_constant() for part in self.parts)


@contextmanager
def texts_left_open() -> Iterator[None]:
    """F-strings fix the sizes in them where they are used, and not before.

    There a number is written by its format: Dynamo's own is that of its text.
    """
    from torch._dynamo import symbolic_convert

    build = symbolic_convert.InstructionTranslatorBase.BUILD_STRING

    def building(self: Any, instruction: Any) -> None:
        parts = self.popn(instruction.arg)
        sizes = [part for part in parts if _tells_a_size(part)]
        alone = all(_tells_a_size(part) or part.is_python_constant() for part in parts)
        if sizes and alone and not any(map(_is_data, sizes)):
            self.push(LazyVariableTracker.create(_Text(parts), source=None))
        else:  # with what one tells of a tensor, the text is no constant anyway
            self.stack.extend(_of_values(part) if _tells_a_size(part) else part for part in parts)
            build(self, instruction)

    translators = (
        symbolic_convert.InstructionTranslator,
        symbolic_convert.InliningInstructionTranslator,
        symbolic_convert.InliningGeneratorInstructionTranslator,
    )
    with ExitStack() as patched:
        patched.enter_context(patch.object(LazySymNodeFormatString, "__repr__", _written))
        for translator in translators:
            table = list(translator.dispatch_table)
            table[dis.opmap["BUILD_STRING"]] = building
            patched.enter_context(patch.object(translator, "dispatch_table", table))
        yield


def _written(text: Any) -> str:
    form: str = text.fmt_var.as_python_constant()
    return form.format(text.sym_node_var.evaluate_expr())


def _tells_a_size(part: Any) -> bool:
    """Whether it is text of a size that is not written yet."""
    return (
        isinstance(part, LazyVariableTracker)
        and not part.is_realized()
        and isinstance(part.original_value(), LazySymNodeFormatString)
    )


def _is_data(part: Any) -> bool:
    """Whether the size is one that hangs on numbers, as of rows that are selected."""
    return bool(free_unbacked_symbols(part.original_value().sym_node_var.sym_num))


def _of_values(part: Any) -> Any:
    """Dynamo's own text that is not for Python to read, as of tensors."""
    from torch._dynamo.variables.misc import StringFormatVariable

    text = part.original_value()
    return StringFormatVariable(text.fmt_var.as_python_constant(), [text.sym_node_var], {})
