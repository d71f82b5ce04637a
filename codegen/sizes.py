"""Lines that bind the sizes which code uses (`batch`, `length`) to those of the tensors at hand."""

from collections.abc import Iterable, Sequence

from fxpipe.ops.specs import sizes_in, where_told
from fxpipe.runtime.manifest import TensorSpec


def size_lines(texts: Iterable[str], values: Sequence[tuple[str, TensorSpec]]) -> list[str]:
    """The lines that define every size named in `texts`, read off `values` (variable, spec).

    A tensor that tells several at once is unpacked: `batch, length, _ = x.shape`.
    """
    wanted = dict.fromkeys(name for text in texts for name in sizes_in(text))
    lines: list[str] = []
    while wanted:
        told = [[dim for dim in spec.shape if dim in wanted] for _, spec in values]
        most = max(range(len(values)), key=lambda k: len(set(told[k])), default=None)
        if most is None or len(told[most]) < 2 or len(set(told[most])) < len(told[most]):
            return lines + [_read(name, values) for name in wanted]
        variable, spec = values[most]
        parts = [str(dim) if dim in wanted else "_" for dim in spec.shape]
        lines.append(f"{', '.join(parts)} = {variable}.shape")
        wanted = {name: None for name in wanted if name not in told[most]}
    return lines


def _read(name: str, values: Sequence[tuple[str, TensorSpec]]) -> str:
    """A line that reads one size, off a tensor that has it undivided if possible."""
    told = [(v, place) for v, spec in values if (place := where_told(spec, name)) is not None]
    assert told, f"wiring gives a stage that needs the size {name!r} a value that has it"
    variable, (dim, factor) = min(told, key=lambda one: one[1][1])
    return f"{name} = {variable}.size({dim})" + (f" // {factor}" if factor > 1 else "")
