"""The pass for those who keep ``backend="inductor"``.

A module of its own because Inductor takes seconds to import, which is the user's to ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fxfuse import backend, ops


class InductorPass(CustomGraphPass):
    """Fuses a graph before autograd: for ``torch._inductor.config.pre_grad_custom_pass``.

    Args:
        channels_last: As in `fxfuse.optimize`.
    """

    def __init__(self, channels_last: ops.ChannelsLast = "keep") -> None:
        self.channels_last = channels_last

    def __call__(self, graph: fx.Graph) -> None:
        """Edits a graph, which must belong to a GraphModule."""
        backend.fuse_pre_grad_graph(graph, self.channels_last)

    def uuid(self) -> str:
        """Changes with our sources, the compiled library and the settings."""
        return backend.fingerprint("pre-grad", self.channels_last)

    # torch 2.11 takes the pickled pass for the key of its cache.
    def __getstate__(self) -> dict[str, Any]:
        return {"channels_last": self.channels_last, "uuid": self.uuid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.channels_last = state["channels_last"]


class Chain(CustomGraphPass):
    """Passes that run one after the other.  torch 2.11 takes only one where later ones take a list.

    Args:
        passes: The passes.
    """

    def __init__(self, *passes: Callable[[fx.Graph], Any]) -> None:
        self.passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        """Runs each on a graph."""
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any | None:
        """Those of the passes; None, which means that nothing is cached, where one has none."""
        uuids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes]
        return None if None in uuids else repr(uuids)

    def __getstate__(self) -> dict[str, Any]:
        return {"passes": self.passes, "uuid": self.uuid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


def chain(installed: Any, ours: InductorPass) -> Any:
    """Our pass after what is installed already: nothing, a pass, or a list of passes."""
    if installed is None:
        return ours
    return Chain(*(installed if isinstance(installed, (list, tuple)) else [installed]), ours)


inductor_pass = InductorPass()
