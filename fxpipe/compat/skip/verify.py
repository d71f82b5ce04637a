"""Every skip needs one layer that stashes it and, later, one that pops it."""

from torch import nn

from fxpipe.compat.skip.layout import skippables
from fxpipe.compat.skip.tracker import Skip


def verify_skippables(module: nn.Sequential) -> None:
    """Raise TypeError that lists every skip of the layers whose stash and pop do not match."""
    stashed: dict[Skip, None] = {}
    popped: set[Skip] = set()
    broken: list[str] = []
    for layer_name, layer in skippables(module):
        both = layer.stashable_names & layer.poppable_names
        broken += [
            f"'{layer_name}' declared '{name}' both as stashable and as poppable"
            for name in sorted(both)
        ]
        for skip in layer.stashable():
            if skip[1] in both:
                continue
            if skip in stashed:
                broken.append(_again(layer_name, skip, "stashable"))
            stashed[skip] = None
        for skip in layer.poppable():
            if skip[1] in both:
                continue
            if skip in popped:
                broken.append(_again(layer_name, skip, "poppable"))
            elif skip not in stashed:
                broken.append(
                    f"'{layer_name}' declared '{skip[1]}' as poppable but it was not stashed"
                )
            else:
                popped.add(skip)
    broken += [
        f"no module declared '{name}' as poppable but stashed"
        for ns, name in stashed
        if (ns, name) not in popped
    ]
    if broken:
        raise TypeError(
            "one or more pairs of stash and pop do not match:\n\n"
            + "\n".join(f"* {rule}" for rule in broken)
        )


def _again(layer_name: str, skip: Skip, kind: str) -> str:
    return f"'{layer_name}' redeclared '{skip[1]}' as {kind} but not isolated by namespace"
