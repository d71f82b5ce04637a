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


class _Text(LazySymNodeFormatString):
    """Parts of an f-string, some of which tell of sizes."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        """The text, for which the sizes are fixed."""
        return "".join(part.as_python_constant() for part in self.parts)


@contextmanager
def texts_left_open() -> Iterator[None]:
    """F-strings fix the sizes in them where they are used, and not before."""
    from torch._dynamo import symbolic_convert

    build = symbolic_convert.InstructionTranslatorBase.BUILD_STRING

    def building(self: Any, instruction: Any) -> None:
        parts = self.popn(instruction.arg)
        if not any(map(_tells_a_size, parts)):
            self.stack.extend(parts)
            build(self, instruction)
        elif all(_tells_a_size(part) or part.is_python_constant() for part in parts):
            self.push(LazyVariableTracker.create(_Text(parts), source=None))
        else:  # one tells of a tensor, so that the text is no constant anyway
            self.stack.extend(_of_values(part) if _tells_a_size(part) else part for part in parts)
            build(self, instruction)

    translators = (
        symbolic_convert.InstructionTranslator,
        symbolic_convert.InliningInstructionTranslator,
        symbolic_convert.InliningGeneratorInstructionTranslator,
    )
    with ExitStack() as patched:
        for translator in translators:
            table = list(translator.dispatch_table)
            table[dis.opmap["BUILD_STRING"]] = building
            patched.enter_context(patch.object(translator, "dispatch_table", table))
        yield


def _tells_a_size(part: Any) -> bool:
    """Whether it is text of a size, or with sizes in it, that is not written yet."""
    return (
        isinstance(part, LazyVariableTracker)
        and not part.is_realized()
        and isinstance(part.original_value(), LazySymNodeFormatString)
    )


def _of_values(part: Any) -> Any:
    """Dynamo's own text that is not for Python to read, as of tensors."""
    from torch._dynamo.variables.misc import StringFormatVariable

    text = part.original_value()
    return StringFormatVariable(text.fmt_var.as_python_constant(), [text.sym_node_var], {})
